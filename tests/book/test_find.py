"""A search leads first to the page that answers it."""

import pytest
from project import pages

from book._ext import find

TYPED = {
    "out of memory": "book/your_script",
    "config.json": "book/your_script",
    "Qwen": "book/your_script",
    "OOM": "chapters/01b_when_it_runs_out",
    "CUDA out of memory": "chapters/01b_when_it_runs_out",
    "fragmentation": "chapters/01a_caching_allocator",
    "flash attention": "chapters/02_ledger",
    "8-bit Adam": "chapters/07b_which_optimizer",
    "LoRA": "chapters/07_adapters",
    "QLoRA": "chapters/07_adapters",
    "batch size": "chapters/03_accumulation",
    "gradient checkpointing": "chapters/04_checkpointing",
    "bf16 T4": "chapters/06_precision",
    "DeepSpeed": "chapters/09_sharding",
    "FSDP": "chapters/09_sharding",
    "offload": "chapters/08_offloading",
    "CPU offload": "chapters/08b_elsewhere",
    "Liger": "chapters/08a_the_loss",
}

CHINESE = {
    "梯度累积": "chapters/03_accumulation",
    "批次大小": "chapters/03_accumulation",
    "激活检查点": "chapters/04_checkpointing",
    "重计算": "chapters/04_checkpointing",
    "混合精度": "chapters/06_precision",
    "显存不足": "chapters/01b_when_it_runs_out",
    "内存碎片": "chapters/01a_caching_allocator",
    "微调": "chapters/07_adapters",
    "适配器": "chapters/07_adapters",
    "卸载": "chapters/08_offloading",
    "分片": "chapters/09_sharding",
    "流水线并行": "chapters/10_parallelism",
    "LoRA": "chapters/07_adapters",
}


def test_no_entry_is_of_a_page_that_is_gone():
    assert {*find.TYPED, *find.CHINESE} <= set(pages())


SEARCHES = [("", *one) for one in TYPED.items()]
SEARCHES += [("zh/", *one) for one in CHINESE.items()]


@pytest.mark.parametrize(("language", "typed", "answers"), SEARCHES)
def test_the_page_that_answers_is_first(
    window, site, language, typed, answers
):
    page = window("desktop")
    page.goto(f"{(site / f'{language}search.html').as_uri()}?q={typed}")
    first = page.locator("#search-results li a").first
    href = first.get_attribute("href", timeout=10_000)
    assert href.startswith(f"{answers}.html")


def test_qlora_leads_to_the_command_too(window, site):
    page = window("desktop")
    page.goto(f"{(site / 'search.html').as_uri()}?q=QLoRA")
    found = page.locator("#search-results li a")
    found.nth(2).wait_for()
    first = [found.nth(place).get_attribute("href") for place in range(3)]
    assert any(link.startswith("book/your_script.html") for link in first)


def test_the_way_to_search_stays_when_the_menu_scrolls(window, site):
    page = window("desktop")
    page.goto((site / "chapters/12_claims.html").as_uri())
    menu = page.locator(".bd-sidebar-primary")
    menu.evaluate("(it) => it.scrollTo(0, it.scrollHeight)")
    assert menu.evaluate("(it) => it.scrollTop") > 200
    button = menu.locator(".search-button__button").bounding_box()
    assert 0 <= button["y"] < 50
