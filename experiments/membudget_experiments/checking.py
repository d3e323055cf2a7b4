"""What a record holds, field by field: the schema, and what it cannot say."""

import json
from pathlib import Path

from membudget.records.record import check

SCHEMA = Path(__file__).with_name("schema.json")


def problems(path: Path) -> list[str]:
    """What is wrong with the record in a file, as sentences.

    Raises:
        ModuleNotFoundError: ``jsonschema`` is not installed.
    """
    from jsonschema import Draft202012Validator

    if wrong := check(path):
        return wrong
    record = json.loads(path.read_text("utf-8"))
    schema = Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))
    found = [
        f"{'.'.join(map(str, error.absolute_path)) or 'it'}: {error.message}"
        for error in schema.iter_errors(record)
    ]
    if found:
        return found
    predicted = record["prediction"] and record["prediction"]["utc"]
    if predicted and record["utc"] and predicted > record["utc"]:
        found.append(
            f"its prediction was stored at {predicted}, after the "
            f"measurement at {record['utc']}"
        )
    found += [
        f"sample {number} has the keys {', '.join(sample)}: units are given "
        f"for {', '.join(record['units'])}"
        for number, sample in enumerate(record["samples"])
        if sample.keys() != record["units"].keys()
    ]
    return found
