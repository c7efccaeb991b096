"""The AsyncAPI document of an application's topics."""

import json
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from jobs.application import load_application
from jobs.async_api import describe_topics
from jobs.commands import app
from jobs.topics import application_topics

TEXT = {"type": "string"}
DOCUMENT = {
    "type": "object",
    "required": ["asyncapi", "info"],
    "properties": {
        "asyncapi": {"const": "3.0.0"},
        "info": {"type": "object", "required": ["title", "version"], "properties": {"title": TEXT, "version": TEXT}},
        "defaultContentType": TEXT,
        "channels": {
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "address": TEXT,
                    "description": TEXT,
                    "bindings": {"type": "object"},
                    "messages": {
                        "additionalProperties": {
                            "type": "object",
                            "properties": {
                                "name": TEXT,
                                "title": TEXT,
                                "summary": TEXT,
                                "description": TEXT,
                                "contentType": TEXT,
                                "headers": {"type": "object"},
                                "bindings": {"type": "object"},
                                "payload": {"required": ["schemaFormat", "schema"]},
                            },
                            "additionalProperties": False,
                        }
                    },
                },
                "additionalProperties": False,
            }
        },
        "operations": {
            "additionalProperties": {
                "type": "object",
                "required": ["action", "channel"],
                "properties": {
                    "action": {"enum": ["send", "receive"]},
                    "channel": {"required": ["$ref"]},
                    "summary": TEXT,
                    "description": TEXT,
                    "messages": {"type": "array", "items": {"required": ["$ref"]}},
                },
                "additionalProperties": False,
            }
        },
    },
    "additionalProperties": False,
}
"""What AsyncAPI 3.0 (asyncapi.com/docs/reference/specification/v3.0.0) asks of the objects that are in ours."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = CliRunner().invoke(app, ["topics", "doc"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_a_valid_document(document: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(DOCUMENT).validate(document)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for operation in document["operations"].values():
        for reference in [operation["channel"], *operation.get("messages", [])]:
            found: Any = document
            for step in reference["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            assert found


def test_every_topic_is_in_it_with_its_configuration_and_an_operation(document: dict[str, Any]) -> None:
    topics = application_topics(load_application("jobs.flights"))
    assert list(document["channels"]) == [topic.name for topic in topics]
    for topic in topics:
        binding = document["channels"][topic.name]["bindings"]["kafka"]
        assert binding["topic"] == topic.name
        if "retention.ms" in topic.config:
            assert binding["topicConfiguration"]["retention.ms"] == int(topic.config["retention.ms"])
    described = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert described == {f"#/channels/{topic.name}" for topic in topics}


def test_the_payload_of_events_is_held_to_the_contract(document: dict[str, Any]) -> None:
    (view,) = [view for view in load_application("jobs.flights").views.values() if view.name == "aircraft_landings"]
    schema = document["channels"]["flights.landed"]["messages"]["event"]["payload"]["schema"]
    assert schema["properties"] == dict(view.sources[0].schema.fields)


def test_no_reference_leads_out_of_a_payload(document: dict[str, Any]) -> None:
    for channel in document["channels"].values():
        for message in channel["messages"].values():
            assert "$ref" not in json.dumps(message)
            assert "$defs" not in json.dumps(message)
    score = document["channels"]["scores.late_arrival"]["messages"]["score"]["payload"]["schema"]
    assert score["properties"]["features"]["properties"]["airport_departures"]["required"][0] == "version"


def test_it_is_the_same_every_time() -> None:
    application = load_application("jobs.flights")
    first, second = (json.dumps(describe_topics(application, version="1")) for _ in range(2))
    assert first == second
