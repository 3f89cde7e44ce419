"""Settings: arguments win over the environment, and a wrong value says what would be right."""

from __future__ import annotations

import pytest

from streamshim.settings import BINDERS, Mode, Settings

NO_FLAG = "allowed values: '1', 'true', 'yes', 'on', '0', 'false', 'no', 'off', or unset"
NO_MODE = "allowed values: 'bind', 'strict', 'check', 'off'"


@pytest.mark.parametrize(
    ("argument", "environ", "mode", "source"),
    [
        (None, {}, "bind", "default"),
        (None, {"STREAMSHIM_MODE": ""}, "bind", "default"),
        (None, {"STREAMSHIM_MODE": "check"}, "check", "STREAMSHIM_MODE"),
        (None, {"STREAMSHIM_MODE": "Strict"}, "strict", "STREAMSHIM_MODE"),
        (None, {"STREAMSHIM_STRICT": "1"}, "strict", "STREAMSHIM_STRICT"),
        (None, {"STREAMSHIM_STRICT": "0"}, "bind", "default"),
        (None, {"STREAMSHIM_STRICT": ""}, "bind", "default"),
        (None, {"STREAMSHIM": "1"}, "bind", "default"),
        (None, {"STREAMSHIM": "0"}, "bind", "default"),
        (None, {"STREAMSHIM": "Strict"}, "strict", "STREAMSHIM"),
        (None, {"STREAMSHIM": "check", "STREAMSHIM_MODE": "check"}, "check", "STREAMSHIM_MODE"),
        ("bind", {"STREAMSHIM": "strict"}, "bind", "argument"),
        (None, {"STREAMSHIM_STRICT": "0", "STREAMSHIM_MODE": "off"}, "off", "STREAMSHIM_MODE"),
        (None, {"STREAMSHIM_STRICT": "1", "STREAMSHIM_MODE": "strict"}, "strict", "STREAMSHIM_MODE"),
        ("off", {}, "off", "argument"),
        ("CHECK", {}, "check", "argument"),
        (Mode.CHECK, {}, "check", "argument"),
        ("bind", {"STREAMSHIM_MODE": "check"}, "bind", "argument"),
        ("bind", {"STREAMSHIM_STRICT": "1"}, "bind", "argument"),
    ],
)
def test_mode_comes_from_the_argument_then_the_environment(argument, environ, mode, source):
    settings = Settings.read(argument, environ=environ)
    assert (settings.mode, settings.source) == (Mode(mode), source)


@pytest.mark.parametrize("value", ["1", "true", "YES", "On"])
def test_every_true_word_sets_a_flag(value):
    assert Settings.read(environ={"STREAMSHIM_STRICT": value}).mode is Mode.STRICT
    assert Settings.read(environ={"STREAMSHIM_DISABLE": value}).disabled == f"STREAMSHIM_DISABLE={value}"


@pytest.mark.parametrize("value", ["", "0", "False", "no", "OFF"])
def test_every_false_word_leaves_a_flag_unset(value):
    settings = Settings.read(environ={"STREAMSHIM_STRICT": value, "STREAMSHIM_DISABLE": value})
    assert (settings.mode, settings.disabled) == (Mode.BIND, "")


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        ({"mode": "fast"}, {}, f"mode is 'fast'; {NO_MODE}"),
        ({"mode": ""}, {}, f"mode is ''; {NO_MODE}"),
        ({"mode": 1}, {}, f"mode is 1; {NO_MODE}"),
        ({}, {"STREAMSHIM_MODE": "loud"}, f"STREAMSHIM_MODE is 'loud'; {NO_MODE}"),
        # A wrong variable is wrong even where an argument would win: whoever set it believes that it does something.
        ({"mode": "bind"}, {"STREAMSHIM_MODE": "loud"}, f"STREAMSHIM_MODE is 'loud'; {NO_MODE}"),
        ({}, {"STREAMSHIM_STRICT": "2"}, f"STREAMSHIM_STRICT is '2'; {NO_FLAG}"),
        ({}, {"STREAMSHIM_DISABLE": "please"}, f"STREAMSHIM_DISABLE is 'please'; {NO_FLAG}"),
        ({"only": ["cute", "cupy"]}, {}, "only names 'cupy'; binders that exist: {binders}"),
        ({"only": "triton"}, {}, "only names 'triton'; binders that exist: {binders}"),
        ({"only": 5}, {}, "only is 5; accepted: names of binders: {binders}"),
        ({"skip": ["b", "a"]}, {}, "skip names 'a', 'b'; binders that exist: {binders}"),
        (
            {},
            {"STREAMSHIM_STRICT": "yes", "STREAMSHIM_MODE": "check"},
            "STREAMSHIM_MODE=check and STREAMSHIM_STRICT=yes ask for different modes: unset all but one of them",
        ),
    ],
)
def test_a_wrong_value_names_itself_and_what_is_allowed(arguments, environ, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        Settings.read(**arguments, environ=environ)
    assert str(error.value) == text.replace("{binders}", ", ".join(map(repr, BINDERS)))


@pytest.mark.parametrize(
    ("only", "skip", "wanted"),
    [
        (None, None, True),
        (["cute"], None, True),
        ("cute", None, True),
        ([], None, False),
        (None, ["cute"], False),
        (None, "cute", False),
        (("cute",), {"cute"}, False),
    ],
)
def test_only_and_skip_choose_binders(only, skip, wanted):
    assert Settings.read(only=only, skip=skip, environ={}).wants("cute") is wanted


@pytest.mark.parametrize(
    ("mode", "environ", "active"),
    [("bind", {}, True), ("check", {}, True), ("off", {}, False), ("strict", {"STREAMSHIM_DISABLE": "1"}, False)],
)
def test_off_and_disabled_are_not_active(mode, environ, active):
    assert Settings.read(mode, environ=environ).active is active


def test_the_environment_of_the_process_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("STREAMSHIM_MODE", "check")
    assert Settings.read().mode is Mode.CHECK


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Settings.read(environ={}).mode = Mode.OFF


def test_a_mode_prints_as_its_word():
    assert [str(mode) for mode in Mode] == ["bind", "strict", "check", "off"]
