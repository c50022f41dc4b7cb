//! Names of published checkpoints.

/// Returns the name of the checkpoint of a step.
pub fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// Returns the step in the name of a published checkpoint; `None` if [`name_of`] does not return
/// such a name.
pub fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == name).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_the_program_writes_are_checkpoints() {
        assert_eq!(
            (step_of("step-00000007"), step_of("step-123456789")),
            (Some(7), Some(123_456_789))
        );
        for name in [
            "step-7",
            "step-+0000007",
            "step--0000007",
            "step-0123456789",
            "step-00000007.tmp",
            "step-0000000x",
        ] {
            assert_eq!(step_of(name), None, "{name}");
        }
    }
}
