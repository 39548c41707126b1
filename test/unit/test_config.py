"""FtConfig: what a user may write, what wins, and what an error says."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ft.config import CONFIG_ENV, FtConfig, add_help_group
from sglang_ft.errors import ConfigError


def test_defaults_when_nothing_is_said():
    config, rest = FtConfig.parse([], {})
    assert config == FtConfig()
    assert rest == []


def test_sglang_arguments_pass_through_untouched_and_in_order():
    argv = [
        "--model-path",
        "m",
        "--ft-worker-threads",
        "3",
        "--port=1",
        "-h",
        "--json-model-override-args",
        "{}",
    ]
    config, rest = FtConfig.parse(argv, {})
    assert config.worker_threads == 3
    assert rest == ["--model-path", "m", "--port=1", "-h", "--json-model-override-args", "{}"]


def test_flag_wins_over_environment_and_environment_over_default():
    env = {"SGLANG_FT_WORKER_THREADS": "5", "SGLANG_FT_WORKER_ISA": "avx2"}
    config, _ = FtConfig.parse(["--ft-worker-threads=7"], env)
    assert (config.worker_threads, config.worker_isa, config.worker_blocks) == (7, "avx2", 2)


def test_the_last_of_two_equal_flags_wins():
    assert FtConfig.parse(["--ft-worker-blocks", "3", "--ft-worker-blocks=4"], {})[0].worker_blocks == 4


@pytest.mark.parametrize(
    "word,value", [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)]
)
def test_words_for_true_and_false(word, value):
    assert FtConfig.parse([], {"SGLANG_FT_FORCE_VERSION": word})[0].force_version is value
    assert FtConfig.parse([f"--ft-force-version={word}"], {})[0].force_version is value


def test_settings_of_the_expert_cache():
    assert (FtConfig().moe_mode, FtConfig().slots, FtConfig().route_trace) == ("auto", 0, "")
    argv = ["--ft-moe-mode", "cache", "--ft-slots=3789", "--ft-recalibrate", "--ft-dummy-locality", "0.5"]
    argv += ["--ft-route-trace", "routes of today", "--ft-record-routes=/tmp/routes=1"]
    config, rest = FtConfig.parse(argv, {"SGLANG_FT_MOE_MODE": "cpu", "SGLANG_FT_SLOTS": "1"})
    assert (config.moe_mode, config.slots, config.recalibrate) == ("cache", 3789, True)
    assert (config.dummy_locality, config.route_trace) == (0.5, "routes of today")
    assert config.record_routes == "/tmp/routes=1"
    assert rest == []
    assert FtConfig.from_json(config.to_json()) == config


def test_a_switch_takes_no_value_and_leaves_the_next_argument_alone():
    config, rest = FtConfig.parse(["--ft-force-version", "--trust-remote-code"], {})
    assert config.force_version and rest == ["--trust-remote-code"]


@pytest.mark.parametrize(
    "argv,env,words",
    [
        (
            ["--ft-worker-threads", "many"],
            {},
            ["--ft-worker-threads", "'many'", "a whole number from 0 to 1,024"],
        ),
        (["--ft-worker-threads", "-1"], {}, ["--ft-worker-threads", "-1", "default: 0"]),
        (["--ft-worker-isa=sse9"], {}, ["--ft-worker-isa", "'sse9'", "avx512_bf16"]),
        (["--ft-worker-stall-s", "nan"], {}, ["--ft-worker-stall-s", "nan", "0.1"]),
        (["--ft-worker-cores", "a-b"], {}, ["--ft-worker-cores", "'a-b'", "0-5,8"]),
        (["--ft-force-version=maybe"], {}, ["--ft-force-version", "'maybe'", "true or false"]),
        ([], {"SGLANG_FT_RAM_RESERVE_GIB": "-2"}, ["SGLANG_FT_RAM_RESERVE_GIB", "-2", "GiB"]),
        (
            ["--ft-moe-mode", "gpu"],
            {},
            ["--ft-moe-mode", "'gpu'", "one of auto, resident, cache, hybrid, cpu"],
        ),
        (["--ft-slots=-1"], {}, ["--ft-slots", "-1", "a whole number from 0 to 1,000,000 slots"]),
        (["--ft-slots", "37%"], {}, ["--ft-slots", "'37%'", "slots"]),
        (["--ft-dummy-locality=11"], {}, ["--ft-dummy-locality", "from 0 to 10"]),
        (["--ft-route-trace"], {}, ["--ft-route-trace", "missing", "a file"]),
        (["--ft-record-routes", "--port"], {}, ["--ft-record-routes", "missing", "a file"]),
        ([], {"SGLANG_FT_RECALIBRATE": "perhaps"}, ["SGLANG_FT_RECALIBRATE", "true or false"]),
        (["--ft-worker-threads"], {}, ["--ft-worker-threads", "missing"]),
        (["--ft-worker-threads", "--port"], {}, ["--ft-worker-threads", "missing"]),
        (["--ft-worker-thread", "2"], {}, ["--ft-worker-thread:", "did you mean --ft-worker-threads"]),
        (["--ft-qqqqqqqqqq"], {}, ["--ft-qqqqqqqqqq", "--help"]),
        (
            [],
            {"SGLANG_FT_WORKER_THREAD": "2"},
            ["SGLANG_FT_WORKER_THREAD:", "did you mean SGLANG_FT_WORKER_THREADS"],
        ),
    ],
)
def test_a_wrong_word_is_named_with_what_is_allowed(argv, env, words):
    with pytest.raises(ConfigError) as e:
        FtConfig.parse(argv, env)
    for word in words:
        assert word in str(e.value)


def test_variables_of_others_are_left_alone():
    assert (
        FtConfig.parse([], {"SGLANG_FT_VENV": "/x", "SGLANG_FT_CONFIG": "{}", "HOME": "/"})[0] == FtConfig()
    )


def test_limits_hold_for_settings_made_in_code_too():
    with pytest.raises(ConfigError, match="--ft-worker-blocks"):
        FtConfig(worker_blocks=0)
    with pytest.raises(ConfigError, match="--ft-worker-blocks"):
        FtConfig(worker_blocks=True)


@given(
    st.builds(
        FtConfig,
        moe_mode=st.sampled_from(["auto", "resident", "cache", "hybrid", "cpu"]),
        slots=st.integers(0, 1_000_000),
        route_trace=st.sampled_from(["", "routes", '/a b/c="d']),
        dummy_locality=st.floats(0, 10),
        worker_threads=st.integers(0, 1024),
        worker_cores=st.sampled_from(["", "0", "0-5,8"]),
        worker_stall_s=st.floats(0.1, 3600),
        force_version=st.booleans(),
    )
)
def test_a_child_process_reads_the_same_settings(config):
    environ: dict[str, str] = {}
    config.publish(environ)
    assert FtConfig.inherited(environ) == config


def test_a_process_without_published_settings_says_so():
    with pytest.raises(ConfigError, match=CONFIG_ENV):
        FtConfig.inherited({})
    with pytest.raises(ConfigError, match="another sglang_ft version"):
        FtConfig.from_json('{"no_such_setting": 1}')


def test_help_lists_every_setting_once_with_default_unit_and_variable():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    add_help_group(parser)
    text = " ".join(parser.format_help().split())
    assert text.index("--model-path") < text.index("sglang_ft:")
    for o in FtConfig.options():
        assert f"[{o.env}]" in text
        assert f"(default: {o.default_text}{' ' + o.unit if o.unit else ''})" in text
