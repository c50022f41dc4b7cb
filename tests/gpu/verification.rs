//! `scripts/gpu-verify`: its newer checks pass on a simulated GPU and fail where they must, and its
//! record has a place in a page.

use std::path::Path;
use std::process::Command;

use hpctrain_testkit::launch::{finish, in_our_environment, test_name};
use hpctrain_testkit::python::python_with;
use hpctrain_testkit::runs::json;
use hpctrain_testkit::simulator::{Settings, with_simulator};
use serde_json::Value;

/// Returns a command that starts the script, or none without Python.
fn script() -> Option<Command> {
    let mut command = python_with("json")?;
    command.args(["-B", concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu-verify")]);
    in_our_environment(&mut command);
    Some(command)
}

fn no_python() {
    println!("SKIPPED: {}: no python3; scripts/setup --test installs it", test_name());
}

/// Runs checks at tiny sizes, which end with an exit code, and returns their results.
#[track_caller]
fn checked(mut script: Command, root: &Path, only: &str, code: i32, sim: Settings) -> Value {
    let out = root.join("out");
    script.arg(&out).args(["--small", "--only", only]).arg("--work").arg(root.join("work"));
    script.env("HPCTRAIN", hpctrain_testkit::program());
    let ended = finish(with_simulator(&mut script).envs(sim.iter().copied()));
    assert_eq!(ended.code(), code, "{ended}");
    json(&out.join("gpu-verification.json"))["checks"].take()
}

#[test]
fn new_checks_pass_on_a_simulated_gpu() {
    let Some(script) = script() else { return no_python() };
    let root = tempfile::tempdir().unwrap();
    let only = "nccl-alone,layouts-auto-bf16,layouts-cuda-ipc-bf16,networks-bf16,logits-2g-bf16";
    let checks = checked(script, root.path(), only, 0, &[]);
    for name in only.split(',') {
        assert_eq!(checks[name]["status"], "pass", "{name}: {checks}");
    }
    let auto = checks["layouts-auto-bf16"]["detail"].as_str().unwrap();
    assert!(
        auto.contains("; transport host-staged: NCCL not used: ranks 0, 1 share a GPU"),
        "{auto}"
    );
}

#[test]
fn a_failing_nccl_fails_its_check() {
    let Some(script) = script() else { return no_python() };
    let root = tempfile::tempdir().unwrap();
    let checks = checked(script, root.path(), "nccl", 1, &[("CUDASIM_FAIL", "nccl")]);
    assert_eq!(checks["nccl-alone"]["status"], "FAIL", "{checks}");
    let detail = checks["nccl-alone"]["detail"].as_str().unwrap();
    assert!(detail.contains("NCCL could not"), "{detail}");
}

#[test]
fn an_old_nccl_skips_its_check() {
    let Some(script) = script() else { return no_python() };
    let root = tempfile::tempdir().unwrap();
    let checks = checked(script, root.path(), "nccl", 0, &[("CUDASIM_NCCL_VERSION", "21702")]);
    assert_eq!(checks["nccl-alone"]["status"], "skip", "{checks}");
    let detail = checks["nccl-alone"]["detail"].as_str().unwrap();
    assert!(detail.contains("NCCL is too old: 2.17.2"), "{detail}");
}

const PAGE: &str = "# Title\n\nRun on X at 2026-01-01: 1 checks passed.\n\nText.\n\n\
                    <!-- results: written by gpu-verify --record -->\nold\n<!-- end of results -->\n";

#[test]
fn a_record_keeps_the_title_of_its_page() {
    let root = tempfile::tempdir().unwrap();
    let results = root.path().join("results.json");
    let text = r#"{"date": "2026-02-03T00:00:00+00:00", "small": false, "machine": {"device": "Y"},
        "checks": {"doctor": {"status": "pass", "detail": "fine", "seconds": 1.0}}}"#;
    std::fs::write(&results, text).unwrap();
    let page = root.path().join("page.md");
    for (before, code) in [(PAGE.to_owned(), 0), (PAGE.replace("Run on", "Ran on"), 2)] {
        std::fs::write(&page, &before).unwrap();
        let Some(mut script) = script() else { return no_python() };
        let ended = finish(script.arg("--record").args([&results, &page]));
        assert_eq!(ended.code(), code, "{ended}");
        let after = std::fs::read_to_string(&page).unwrap();
        if code == 0 {
            let start = "# Title\n\nRun on Y at 2026-02-03: 1 checks passed, 0 failed, 0 skipped.\n\n\
                         Text.\n\n";
            assert!(after.starts_with(start), "{after}");
            assert!(after.contains("| doctor | pass | 1.0 | fine |"), "{after}");
            assert!(!after.contains("\nold\n"), "{after}");
        } else {
            assert_eq!(after, before, "the page is left as it was");
            assert!(ended.stderr.contains("no line that begins with 'Run on '"), "{ended}");
        }
    }
}

/// The page that the record is written to has places for it.
#[test]
fn the_page_of_gpu_verification_has_a_place_for_results() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/gpu-verification.md");
    let text = std::fs::read_to_string(page).unwrap();
    assert!(text.starts_with("# GPU verification\n"));
    assert_eq!(text.lines().filter(|line| line.starts_with("Run on ")).count(), 1);
    for mark in ["<!-- results: written by gpu-verify --record -->", "<!-- end of results -->"] {
        assert_eq!(text.matches(mark).count(), 1, "{mark}");
    }
}
