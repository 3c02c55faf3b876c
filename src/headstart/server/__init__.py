"""An OpenAI-compatible server around one LLM: `headstart serve`. It uses the LLM as any other program would."""
