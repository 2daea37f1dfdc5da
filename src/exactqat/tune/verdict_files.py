# SPDX-License-Identifier: Apache-2.0
"""Verdicts as the files that continuous integration shows: JUnit's XML, Markdown, a badge.

All take what `exactqat gate --json` prints: for each network by name what `Verdict.as_json` holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from ..kit.display import listed

Verdicts = Mapping[str, Mapping[str, Any]]


def failures_of(verdict: Mapping[str, Any], device: str) -> list[str]:
    """The unmet requirements on one device."""
    return [failure for failure in verdict["failures"] if failure.startswith((f"{device}: ", f"{device} "))]


def as_junit(verdicts: Verdicts) -> str:
    """JUnit's XML: a suite for each network, a test for each device."""
    suites = ElementTree.Element("testsuites", name="exactqat gate")
    for name, verdict in verdicts.items():
        failing = [device for device in verdict["devices"] if failures_of(verdict, device)]
        suite = ElementTree.SubElement(
            suites, "testsuite", name=name, tests=str(len(verdict["devices"])), failures=str(len(failing)), errors="0"
        )
        for device, grade in verdict["devices"].items():
            test = ElementTree.SubElement(suite, "testcase", classname=name, name=device)
            unmet = failures_of(verdict, device)
            if unmet:
                failure = ElementTree.SubElement(test, "failure", message=unmet[0], type="requirement")
                failure.text = "\n".join(unmet)
            ElementTree.SubElement(test, "system-out").text = f"score {grade['score']:.6g}"
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def as_markdown(verdicts: Verdicts, metric: str = "score") -> str:
    """A table of networks and devices, and the unmet requirements below it."""
    passes = all(verdict["passes"] for verdict in verdicts.values())
    lines = [
        f"### exactqat gate: {'passes' if passes else 'fails'}",
        "",
        f"| network | device | {_cell(metric)} | outputs that differ | integers run | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, verdict in verdicts.items():
        for device, grade in verdict["devices"].items():
            differing, compared = grade["differing"], verdict.get("compared", {}).get(device)
            cells = [
                _cell(name),
                device,
                f"{grade['score']:.4g}",
                "" if differing is None else f"{differing:,}",
                "" if compared is None else f"{compared:,}",
                "fails" if failures_of(verdict, device) else "passes",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    unmet = [f"- {_cell(name)}: {failure}" for name, verdict in verdicts.items() for failure in verdict["failures"]]
    return "\n".join([*lines, *([""] if unmet else []), *unmet]) + "\n"


def as_badge(verdicts: Verdicts) -> str:
    """A badge as shields.io reads it from an address (https://img.shields.io/endpoint?url=...)."""
    passes = all(verdict["passes"] for verdict in verdicts.values())
    devices = dict.fromkeys(device for verdict in verdicts.values() for device in verdict["devices"])
    message = f"{'passes' if passes else 'fails'} on {listed(list(devices), 4)}"
    color = "brightgreen" if passes else "red"
    return json.dumps({"schemaVersion": 1, "label": "on device", "message": message, "color": color}) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
