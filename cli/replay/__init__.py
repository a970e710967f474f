"""`twinpool replay`: a trace's requests, sent to an OpenAI endpoint as they came once."""
