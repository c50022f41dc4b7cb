//! The role of a process, chosen from environment variables.

use hpctrain::cli::ps_auto::task_from_tf_config;

use super::harness::fuzz;
use super::mutate::Form;

#[test]
fn tf_config_is_read() {
    let seeds = ["chief", "ps", "worker", "evaluator"].map(|kind| {
        let cluster = r#"{"chief": ["a:2222"], "ps": ["b:2222", "b2:2222"], "worker": ["c:2222", "d:2222"]}"#;
        format!(r#"{{"cluster": {cluster}, "task": {{"type": "{kind}", "index": 0}}, "environment": "cloud"}}"#)
            .into_bytes()
    });
    fuzz("TF_CONFIG", Form::Json, &seeds, |input| {
        match task_from_tf_config(&String::from_utf8_lossy(input)) {
            Ok(_) => true,
            Err(e) => {
                assert!(e.to_string().contains("TF_CONFIG: ") && e.advice().is_some(), "{e}");
                false
            }
        }
    });
}
