"""Experiments: what the course measures, beside what it predicts.

Their records are read by :mod:`membudget.records`.
"""
