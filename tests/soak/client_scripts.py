"""What clients do to an endpoint: scripts for their own environments, each with the endpoint's address and the model's
name as arguments.

Each asks for plain text, streams, tools (as the model likes, one at least, one by name, and what comes after a result)
and an answer with a schema, as its package does that. They assert as they go, and say in their last line that they came
to the end. What a model decides by itself isn't asserted, but that the answer is whole.
"""

from __future__ import annotations

_TOOL = """
import json, sys
from typing import Literal

URL, MODEL = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"],
              "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "The weather of a town.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "How will the weather be in Rome?"}]

def in_town(arguments):
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert arguments in ({"town": "Rome"}, {"town": "Oslo"}), arguments
    return True
"""

OPENAI = (
    _TOOL
    + """
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

class Person(BaseModel):
    name: Literal["Ada", "Alan"]
    age: Literal[20, 30]

client = OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
asked = {"model": MODEL, "messages": ASKED, "max_tokens": 100, "temperature": 0, "seed": 1}
(served,) = client.models.list().data
assert served.tools["format"], served
whole = client.chat.completions.create(**asked).choices[0].message.content
assert whole == "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **asked))
named = {"type": "function", "function": {"name": "get_weather"}}
for choice in ("auto", "required", named):
    tools = {"tools": [TOOL, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
    (told,) = client.chat.completions.create(**asked, **tools).choices
    calls = told.message.tool_calls or []
    assert told.finish_reason == (("stop" if choice == named else "tool_calls") if calls else told.finish_reason)
    name, arguments = "", ""
    for chunk in client.chat.completions.create(stream=True, **asked, **tools):
        for call in chunk.choices[0].delta.tool_calls or []:
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    assert [(name, arguments)] * bool(name) == [(call.function.name, call.function.arguments) for call in calls]
    if choice != "auto":
        assert len(calls) == 1
        assert calls[0].function.name == "now" or in_town(calls[0].function.arguments)
    if choice == named:
        assert calls[0].function.name == "get_weather"
        talk = [*ASKED, told.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
        assert client.chat.completions.create(**{**asked, "messages": talk}, tools=[TOOL]).choices[0].message
strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
for call in client.chat.completions.create(**asked, tools=[strict]).choices[0].message.tool_calls or []:
    assert in_town(call.function.arguments)
person = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
assert isinstance(person, Person)
raw = client.chat.completions.with_raw_response.create(**asked, store=True, extra_body={"of_next_year": 1})
assert raw.headers["x-twinpool-ignored"] == "store, of_next_year", raw.headers
try:
    client.chat.completions.create(**asked, extra_body={"bad_words": ["x"]})
    raise SystemExit("bad_words was taken")
except BadRequestError as error:
    assert error.param == "bad_words"
flat = {"type": "function", **FUNCTION, "strict": True}
seeded = {"model": MODEL, "max_output_tokens": 100, "temperature": 0}
for choice in ("auto", "required", {"type": "function", "name": "get_weather"}):
    tools = {"tools": [flat], "tool_choice": choice, "parallel_tool_calls": False}
    response = client.responses.create(input=ASKED, store=True, **seeded, **tools)
    assert response.store is False
    with client.responses.stream(input=ASKED, **seeded, **tools) as stream:
        last = [event for event in stream][-1]
    calls = [item for item in response.output if item.type == "function_call"]
    streamed = [item for item in last.response.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == [call.arguments for call in streamed]
    assert all(in_town(call.arguments) for call in calls)
    assert calls or choice == "auto"
items = [*ASKED, *response.output, {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}]
assert client.responses.create(input=items, tools=[flat], **seeded).status
assert isinstance(client.responses.parse(input="Who?", text_format=Person, **seeded).output_parsed, Person)
print("done")
"""
)

ANTHROPIC = (
    _TOOL
    + """
from anthropic import Anthropic

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": MODEL, "max_tokens": 100, "extra_body": {"seed": 1, "temperature": 0}}
tool = {"name": "get_weather", "description": "The weather of a town.", "input_schema": PARAMETERS, "strict": True}
plain = client.messages.create(messages=ASKED, system="Be brief.", **asked)
with client.messages.stream(messages=ASKED, system="Be brief.", **asked) as stream:
    assert "".join(stream.text_stream) == plain.content[0].text
for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
    tools = {"tools": [tool], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    message = client.messages.create(messages=ASKED, **asked, **tools)
    used = [block for block in message.content if block.type == "tool_use"]
    with client.messages.stream(messages=ASKED, **asked, **tools) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert [block.input for block in used] == [block.input for block in streamed]
    assert all(in_town(block.input) for block in used)
    if choice["type"] != "auto":
        assert len(used) == 1 and message.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": used[0].id, "content": "rain"}
talk = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
assert client.messages.create(messages=talk, tools=[tool], **asked).stop_reason
assert client.messages.count_tokens(model=MODEL, messages=talk, tools=[tool]).input_tokens > 50
schema = {"format": {"type": "json_schema", "schema": PARAMETERS}}
assert in_town(client.messages.create(messages=ASKED, output_config=schema, **asked).content[0].text)
raw = client.messages.with_raw_response.create(messages=ASKED, metadata={"user_id": "u"}, **asked)
assert raw.headers["x-twinpool-ignored"] == "metadata"
print("done")
"""
)

AGENTS = (
    _TOOL
    + """
import asyncio
from agents import (
    Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
called = []

class Weather(BaseModel):
    town: Literal["Rome", "Oslo"]
    wet: bool

@function_tool
def get_weather(town: Literal["Rome", "Oslo"], days: Literal[1, 3]) -> str:
    "The weather of a town."
    called.append((town, days))
    return "rain"

async def main():
    client = AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        for choice in ("required", "get_weather"):
            asked = ModelSettings(tool_choice=choice, max_tokens=300, parallel_tool_calls=False, extra_body={"seed": 5})
            agent = Agent(name="a", instructions="Be brief.", model=kind(MODEL, client), tools=[get_weather],
                          model_settings=asked)
            called.clear()
            whole = await Runner.run(agent, "How will the weather be?", max_turns=8)
            assert called and whole.final_output, (called, whole.final_output)
            kinds = [type(item).__name__ for item in whole.new_items]
            assert kinds[:2] == ["ToolCallItem", "ToolCallOutputItem"] and kinds[-1] == "MessageOutputItem", kinds
            first = list(called)
            streamed = Runner.run_streamed(agent, "How will the weather be?", max_turns=8)
            async for _ in streamed.stream_events():
                pass
            assert called == first * 2 and streamed.final_output == whole.final_output
        told = ModelSettings(max_tokens=100, extra_body={"seed": 5})
        typed = Agent(name="b", model=kind(MODEL, client), output_type=Weather, model_settings=told)
        assert isinstance((await Runner.run(typed, "The weather?")).final_output, Weather)

asyncio.run(main())
print("done")
"""
)

LANGCHAIN = (
    _TOOL
    + """
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
    model = ChatOpenAI(model=MODEL, base_url=URL + "/v1", api_key="none", max_tokens=200, temperature=0.7,
                       use_responses_api=responses, max_retries=0, extra_body={"seed": 1})
    for choice in ("any", "get_weather"):
        bound = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        call = bound.invoke("weather?")
        (told,) = call.tool_calls
        assert told["name"] == "get_weather" and in_town(told["args"])
        whole = None
        for chunk in bound.stream("weather?"):
            whole = chunk if whole is None else whole + chunk
        assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("get_weather", told["args"])]
    talk = [HumanMessage("weather?"), call, ToolMessage("rain", tool_call_id=told["id"])]
    assert model.bind_tools([get_weather], tool_choice="none").invoke(talk).text
    for one in model.bind_tools([get_weather], strict=True).invoke("weather?").tool_calls:
        assert in_town(one["args"])
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Who lives here?")
        assert isinstance(person, Person), person
    assert "".join(chunk.text for chunk in model.stream("The old house")) == model.invoke("The old house").text
print("done")
"""
)

LITELLM = (
    _TOOL
    + """
import litellm

where = {"model": f"openai/{MODEL}", "api_base": URL + "/v1", "api_key": "none"}
named = {"type": "function", "function": {"name": "get_weather"}}
for choice in ("auto", "required", named):
    forced = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "seed": 1, "temperature": 0}
    chat = litellm.completion(messages=ASKED, max_tokens=60, **where, **forced)
    calls = chat.choices[0].message.tool_calls or []
    assert choice == "auto" or (len(calls) == 1 and in_town(calls[0].function.arguments))
    chunks = list(litellm.completion(messages=ASKED, max_tokens=60, stream=True, **where, **forced))
    again = litellm.stream_chunk_builder(chunks, messages=ASKED).choices[0].message.tool_calls or []
    assert [one.function.arguments for one in again] == [one.function.arguments for one in calls]
talk = [*ASKED, chat.choices[0].message, {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}]
assert litellm.completion(messages=talk, max_tokens=20, tools=[TOOL], **where).choices[0].finish_reason
asked = {"messages": [{"role": "user", "content": "The old house"}], "max_tokens": 40, "seed": 1, **where}
whole = litellm.completion(**asked).choices[0].message.content
assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **asked))
schema = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": PARAMETERS}}
assert in_town(litellm.completion(**{**asked, "response_format": schema}).choices[0].message.content)
response = litellm.responses(input="hi", max_output_tokens=100, tool_choice="required", parallel_tool_calls=False,
                             tools=[{"type": "function", **FUNCTION}], **where)
assert in_town(response.output[-1].arguments)
kinds = [event.type.value for event in litellm.responses(input="hi", max_output_tokens=20, stream=True, **where)]
assert kinds[0] == "response.created" and "response.output_text.delta" in kinds, kinds
print("done")
"""
)

PYDANTIC_AI = (
    _TOOL
    + """
import asyncio
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

class Weather(BaseModel):
    town: Literal["Rome", "Oslo"]
    wet: bool

async def main():
    provider = OpenAIProvider(base_url=URL + "/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model, settings = kind(MODEL, provider=provider), {"max_tokens": 120, "temperature": 0, "seed": 1}
        if kind is OpenAIResponsesModel:
            del settings["seed"]
        for form in (NativeOutput(Weather), ToolOutput(Weather)):
            agent = Agent(model, output_type=form, model_settings=settings, retries=3)
            whole = (await agent.run("How will the weather be in Rome?")).output
            assert isinstance(whole, Weather), whole
            async with agent.run_stream("How will the weather be in Rome?") as stream:
                assert await stream.get_output() == whole
        agent = Agent(model, model_settings=settings, instructions="Be brief.")

        @agent.tool_plain
        def get_weather(town: Literal["Rome", "Oslo"]) -> str:
            "The weather of a town."
            return "rain"

        assert (await agent.run("Say hello.", usage_limits=None)).output is not None

asyncio.run(main())
print("done")
"""
)

INSTRUCTOR = (
    _TOOL
    + """
import instructor
from openai import OpenAI
from pydantic import BaseModel

class Weather(BaseModel):
    "The weather of a town."
    town: Literal["Rome", "Oslo"]
    wet: bool

asked = {"model": MODEL, "messages": ASKED, "max_tokens": 120, "seed": 1, "temperature": 0, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0), mode=mode)
    whole = client.chat.completions.create(response_model=Weather, **asked)
    assert isinstance(whole, Weather), whole
    streamed = list(client.chat.completions.create_partial(response_model=Weather, **asked))[-1]
    assert (streamed.town, streamed.wet) == (whole.town, whole.wet), mode
print("done")
"""
)

DSPY = (
    _TOOL
    + """
import dspy

lm = dspy.LM(f"openai/{MODEL}", api_base=URL + "/v1", api_key="none", max_tokens=120, temperature=0, cache=False,
             num_retries=0)
assert lm("The old house")
for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
    (told,) = lm(messages=ASKED, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    (call,) = told["tool_calls"]
    assert in_town(getattr(call, "function", call).arguments)
(told,) = lm(messages=ASKED, tools=[TOOL], tool_choice="auto")
schema = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": PARAMETERS}}
(told,) = lm(messages=ASKED, response_format=schema)
assert in_town(told if isinstance(told, str) else told["text"])

class Ask(dspy.Signature):
    "Say where it rains."
    question: str = dspy.InputField()
    town: Literal["Rome", "Oslo"] = dspy.OutputField()

from dspy import lm15  # a server is declared: of a model that its catalogue doesn't know dspy asks for no schema

access = lm15.AccessPolicy(provider="twinpool", base_url=URL + "/v1")
able = lm15.ModelSupport(function_calling=True, response_schema=True)
lm15.register_provider(lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat()), supports=able)
lm = dspy.LM(f"twinpool/{MODEL}", api_key="none", max_tokens=120, temperature=0, cache=False, num_retries=0)
with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
    assert dspy.Predict(Ask)(question="Where does it rain?").town in ("Rome", "Oslo")
print("done")
"""
)

LLAMA_INDEX = (
    _TOOL
    + """
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

def get_weather(town: Literal["Rome", "Oslo"]) -> str:
    "The weather of a town."
    return "rain"

llm = OpenAILike(model=MODEL, api_base=URL + "/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
                 max_tokens=80, temperature=0, max_retries=0, context_window=2048)
talk = [ChatMessage(role="user", content="How will the weather be in Rome?")]
whole = llm.chat(talk).message.content
assert whole == list(llm.stream_chat(talk))[-1].message.content
tool = FunctionTool.from_defaults(get_weather)
for forced in ({"tool_required": True}, {"tool_choice": "get_weather"}, {}):
    told = llm.chat_with_tools([tool], chat_history=talk, allow_parallel_tool_calls=False, **forced)
    calls = llm.get_tool_calls_from_response(told, error_on_no_tool_call=False)
    last = list(llm.stream_chat_with_tools([tool], chat_history=talk, allow_parallel_tool_calls=False, **forced))[-1]
    again = llm.get_tool_calls_from_response(last, error_on_no_tool_call=False)
    assert [call.tool_kwargs for call in calls] == [call.tool_kwargs for call in again]
    assert not forced or (len(calls) == 1 and in_town(calls[0].tool_kwargs)), calls
    if forced == {"tool_required": True}:
        result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": calls[0].tool_id})
        assert llm.chat([*talk, told.message, result]).message
print("done")
"""
)

IN_A_BROWSER = """
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const parameters = { type: "object", properties: { town: { enum: ["Rome", "Oslo"] } }, required: ["town"],
  additionalProperties: false };
const tool = { type: "function", function: { name: "get_weather", strict: true, parameters } };
const Person = z.object({ name: z.enum(["Ada", "Alan"]), age: z.literal(20) });

class Client {
  constructor(url) {
    this.openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true });
    this.asked = { model: "demo", messages, max_tokens: 60, temperature: 0, seed: 1 };
  }
  async whole() {
    const { data, request_id } = await this.openai.chat.completions.create(this.asked).withResponse();
    return { text: data.choices[0].message.content, usage: data.usage.completion_tokens, request: request_id };
  }
  async streamed() {
    const stream = await this.openai.chat.completions.create(
      { ...this.asked, stream: true, stream_options: { include_usage: true } });
    let text = "", events = 0, usage = 0;
    for await (const chunk of stream) {
      events += 1;
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage?.completion_tokens ?? usage;
    }
    return { text, events, usage };
  }
  async tools(choice) {
    const asked = { ...this.asked, tools: [tool], tool_choice: choice, parallel_tool_calls: false };
    const whole = (await this.openai.chat.completions.create(asked)).choices[0];
    const streamed = (await this.openai.chat.completions.stream(asked).finalChatCompletion()).choices[0];
    return [whole, streamed].map((one) =>
      [one.finish_reason, one.message.tool_calls.map((call) => [call.function.name, call.function.arguments])]);
  }
  async structured() {
    const asked = { ...this.asked, response_format: zodResponseFormat(Person, "person") };
    return (await this.openai.chat.completions.parse(asked)).choices[0].message.parsed;
  }
  async error(body) {
    try {
      await this.openai.chat.completions.create({ ...this.asked, ...body });
    } catch (error) {
      const { status, code, param, type, requestID, message } = error;
      return { name: error.constructor.name, of: error instanceof OpenAI.APIError, status, code, param, type, message,
        request: requestID };
    }
  }
  async aborted() {
    const stop = new AbortController();
    const long = { ...this.asked, max_tokens: 1500, ignore_eos: true, stream: true };
    const stream = await this.openai.chat.completions.create(long, { signal: stop.signal });
    let events = 0;
    for await (const chunk of stream) {
      events += 1;
      if (events === 3) stop.abort();
    }
    return events;
  }
  async response() {
    const asked = { model: "demo", input: "What is the weather in Oslo?", max_output_tokens: 40, temperature: 0 };
    const whole = await this.openai.responses.create(asked);
    const kinds = [];
    let text = "", last;
    for await (const event of await this.openai.responses.create({ ...asked, stream: true })) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event;
    }
    return { whole: whole.output_text, text, first: kinds[0], last: last.type, status: last.response.status };
  }
}
window.client = (url) => { window.openai = new Client(url); return true; };
"""
