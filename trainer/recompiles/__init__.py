"""Why a step, or a function of one's own, would compile again."""
