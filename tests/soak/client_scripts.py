"""What clients do to an endpoint: scripts for their own environments, each with the endpoint's address as argument.

They assert as they go, and say in their last line that they came to the end.
"""

from __future__ import annotations

AGENTS = """
import asyncio, sys
from typing import Literal
from agents import (
    Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
called = []

@function_tool
def get_weather(town: Literal["Rome", "Oslo"], days: Literal[1, 3]) -> str:
    "The weather of a town."
    called.append((town, days))
    return "rain"

async def main():
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    asked = ModelSettings(tool_choice="required", max_tokens=600, parallel_tool_calls=False, extra_body={"seed": 5})
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent(name="a", instructions="Be brief.", model=kind("demo", client), tools=[get_weather],
                      model_settings=asked)
        called.clear()
        whole = await Runner.run(agent, "How will the weather be?", max_turns=6)
        assert len(called) == 1 and whole.final_output, (called, whole.final_output)
        assert [type(item).__name__ for item in whole.new_items] == [
            "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"
        ]
        streamed = Runner.run_streamed(agent, "How will the weather be?", max_turns=6)
        async for _ in streamed.stream_events():
            pass
        assert called[0] == called[1] and streamed.final_output == whole.final_output

asyncio.run(main())
print("done")
"""

LANGCHAIN = """
import sys
from typing import Literal
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Person(BaseModel):
    "A person."
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)

class get_weather(BaseModel):
    "The weather of a town."
    town: Literal["Rome", "Oslo"]

for responses in (False, True):
    model = ChatOpenAI(model="demo", base_url=sys.argv[1] + "/v1", api_key="none", max_tokens=200, temperature=0.7,
                       use_responses_api=responses, max_retries=0, extra_body={"seed": 1})
    call = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke("weather?")
    (told,) = call.tool_calls
    assert told["name"] == "get_weather" and told["args"]["town"] in ("Rome", "Oslo")
    talk = [HumanMessage("weather?"), call, ToolMessage("rain", tool_call_id=told["id"])]
    assert model.bind_tools([get_weather], tool_choice="none").invoke(talk).text
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Who lives here?")
        assert isinstance(person, Person), person
    assert "".join(chunk.text for chunk in model.stream("The old house")) == model.invoke("The old house").text
print("done")
"""

LITELLM = """
import json, sys
import litellm

parameters = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"],
              "additionalProperties": False}
where = {"model": "openai/demo", "api_base": sys.argv[1] + "/v1", "api_key": "none"}
forced = {"tool_choice": "required", "parallel_tool_calls": False}
chat = litellm.completion(messages=[{"role": "user", "content": "hi"}], max_tokens=60, **where, **forced,
                          tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
(call,) = chat.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")
asked = {"messages": [{"role": "user", "content": "The old house"}], "max_tokens": 40, "seed": 1, **where}
whole = litellm.completion(**asked).choices[0].message.content
assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **asked))
response = litellm.responses(input="hi", max_output_tokens=100, **where, **forced,
                             tools=[{"type": "function", "name": "f", "parameters": parameters}])
assert json.loads(response.output[-1].arguments)["town"] in ("Rome", "Oslo")
kinds = [event.type.value for event in litellm.responses(input="hi", max_output_tokens=20, stream=True, **where)]
assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds
print("done")
"""
