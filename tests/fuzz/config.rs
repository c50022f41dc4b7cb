//! Configurations.

use hpctrain::config::{Environment, Sources, load, resolve};

use super::harness::fuzz;
use super::mutate::Form;
use super::samples::sample;

#[test]
fn configurations_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.toml");
    let mut seeds = vec![std::fs::read(sample().run.path("config.toml")).unwrap()];
    let presets = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/config/presets");
    for preset in ["cnn-mnist", "llama-char", "dlrm"] {
        seeds.push(std::fs::read(presets.join(format!("{preset}.toml"))).unwrap());
    }
    fuzz("config", Form::Toml, &seeds, |input| {
        std::fs::write(&path, input).unwrap();
        match load(&Sources { file: Some(&path), ..Sources::default() }) {
            Ok((config, _)) => {
                for (ranks, on_gpu) in [(1, false), (4, true)] {
                    let facts = Environment { ranks, threads: 2, vocabulary: Some(65), on_gpu };
                    if let Ok(plan) = resolve(config.clone(), &facts) {
                        let _ = (
                            plan.tokens_per_step(),
                            plan.network.summary(),
                            plan.network.work_per_block(true),
                        );
                        let _ = serde_json::to_vec(&plan.config).unwrap();
                    }
                }
                true
            }
            Err(e) => {
                assert_eq!(e.exit_code(), 2, "{e}");
                false
            }
        }
    });
}
