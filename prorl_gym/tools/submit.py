"""The tool with which an agent says that it is done."""

from prorl_gym.tools.spec import ToolSpec

SUBMIT = ToolSpec(
    name="submit",
    description="Finish the task. Call it once, when nothing is left to do.",
    parameters={
        "type": "object",
        "properties": {
            "answer": {"type": "string", "description": "Your final answer, where the task asks for one."},
        },
        "required": [],
        "additionalProperties": False,
    },
)
