//! Text generation: with and without a KV cache, on any ranks, in several output formats.

use hpctrain::backend::Backend as _;
use hpctrain::backend::cpu::Cpu;
use hpctrain::comm;
use hpctrain::evaluate::{Sampling, generate};
use hpctrain::mesh::Mesh;
use hpctrain::nn::gpt::Gpt;
use hpctrain::nn::llama::Llama;
use hpctrain::nn::{FrequencyScaling, Network};
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::Zero;
use serde_json::Value;

use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{finish, program};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::{Cut, engine, micro};

/// Returns networks of each family, with variants of attention, embeddings and head.
fn networks() -> Vec<Network> {
    let gpt = |bias| Gpt {
        layers: 2,
        heads: 3,
        width: 24,
        context: 20,
        vocabulary: 31,
        bias,
        dropout: 0.1,
    };
    let llama = |kv_heads, tied, rope_scaling| Llama {
        layers: 2,
        heads: 4,
        kv_heads,
        width: 32,
        hidden: 40,
        context: 20,
        vocabulary: 31,
        rope_theta: 100.0,
        rope_scaling,
        epsilon: 1e-5,
        tied,
        dropout: 0.0,
    };
    let llama3 = FrequencyScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 2.0,
        original_max_position_embeddings: 8,
    };
    vec![
        Network::Gpt(gpt(true)),
        Network::Gpt(gpt(false)),
        Network::Llama(llama(4, false, FrequencyScaling::Unscaled)),
        Network::Llama(llama(2, true, FrequencyScaling::Linear { factor: 2.0 })),
        Network::Llama(llama(1, false, llama3)),
    ]
}

#[test]
fn the_kv_cache_does_not_change_logits() {
    for network in networks() {
        let one = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
        let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
        let mut engine = engine(&comm::single(), &network, one, Zero::Zero, rule, Cut::WHOLE, 1);
        let model = &mut engine.model;
        let context = network.context();
        // With the small initial weights, all tokens would be about equally likely.
        let larger =
            |name: &str, part, _: Option<&_>, range: std::ops::Range<usize>, out: &mut [f32]| {
                if part == 0 {
                    let start = name.len() as u64 * 10_000 + range.start as u64;
                    hpctrain::random::Stream::new(start).fill_normal(out);
                    let is_norm = name.contains("ln_") || name.contains("norm");
                    out.iter_mut()
                        .for_each(|x| *x = if is_norm { 1.0 + 0.1 * *x } else { 0.3 * *x });
                }
                Ok(())
            };
        model.sharded.restore(larger).unwrap();

        // Compute the logits of all positions in pieces of several lengths.
        let tokens: Vec<u32> = (0..context as u32).map(|i| i * 7 % 31).collect();
        let whole = micro(&model.backend, &tokens, &[], context, 0);
        let output = model.output(&whole).unwrap().unwrap();
        let mut caches = model.kv_caches(context).unwrap();
        let mut first = 0;
        for len in [5, 1, 1, 9, 1, 3] {
            let piece = micro(&model.backend, &tokens[first..first + len], &[], len, 0);
            let later = model.output_cached(&piece, &mut caches).unwrap().unwrap();
            first += len;
            let got = model.last_logits(&later, len).unwrap();
            let want = Cpu::view(&output, (first - 1) * 31..first * 31);
            let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let size = want.iter().map(|x| x.abs()).fold(0.0, f32::max);
            assert!(off <= 1e-5 * size && size > 0.5, "{network:?}: {off:e} of {size} at {first}");
        }
        // The caches have room for no more positions.
        let piece = micro(&model.backend, &[1], &[], 1, 0);
        assert!(model.output_cached(&piece, &mut caches).is_err());

        // Compare greedy decoding, also beyond the context, where the window slides.
        let sampling = Sampling { tokens: 30, temperature: 0.0, top_k: None, seed: 0 };
        for prompt in [vec![3], (0..15).collect::<Vec<u32>>(), (0..27).collect()] {
            let drawn = generate(model, &prompt, context, sampling, |_| false).unwrap();
            let mut all = prompt.clone();
            for _ in 0..sampling.tokens {
                let window = &all[all.len().saturating_sub(context)..];
                let window = micro(&model.backend, window, &[], window.len(), 0);
                let output = model.output(&window).unwrap().unwrap();
                let logits = model.last_logits(&output, window.rows()).unwrap();
                let likeliest =
                    (0..31).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
                all.push(likeliest as u32);
            }
            assert_eq!(drawn, all[prompt.len()..], "{network:?}");
            let ended =
                generate(model, &prompt, context, sampling, |drawn| drawn.len() == 4).unwrap();
            assert_eq!(ended, drawn[..4]);
        }
    }
}

/// Returns the output of `hpctrain sample` with these arguments.
fn printed(args: &[&str]) -> String {
    finish(&mut program([&["sample"], args].concat())).succeeded().stdout
}

#[test]
fn samples_are_the_same_in_every_layout() {
    let root = tempfile::tempdir().unwrap();
    for kind in ["gpt", "llama"] {
        let kind = format!("model.kind={kind}");
        let settings =
            [&kind, "run.steps=12", "parallel.virtual_ranks=2", "parallel.virtual_tensor_ranks=2"];
        let files = Run::new(Alone, root.path(), &kind[11..], &settings).succeeds();
        let latest = files.path("checkpoints/latest").display().to_string();
        // The continuation goes beyond the context of 16.
        let sample = |more: &[&str]| {
            printed(
                &[
                    &[
                        "--checkpoint",
                        &latest,
                        "--prompt",
                        "ROMEO:",
                        "--tokens",
                        "14",
                        "--temperature",
                        "0",
                    ],
                    more,
                ]
                .concat(),
            )
        };
        let alone = sample(&[]);
        for layout in [
            "parallel.pipeline=2",
            "parallel.tensor=2",
            "parallel.zero=3",
            "parallel.tensor=2 --set parallel.sequence=true",
        ] {
            let words: Vec<&str> =
                ["--spawn", "2", "--set"].into_iter().chain(layout.split(' ')).collect();
            assert_eq!(sample(&words), alone, "{kind}, {layout}");
        }
    }
}

#[test]
fn several_prompts_and_stop_texts() {
    let root = tempfile::tempdir().unwrap();
    let files = Run::new(Alone, root.path(), "x", &["run.steps=12"]).succeeds();
    let latest = files.path("checkpoints/latest").display().to_string();
    let list = root.path().join("prompts").display().to_string();
    std::fs::write(&list, "JULIET:\n\nA rose\r\n").unwrap();
    let sample =
        |more: &[&str]| printed(&[&["--checkpoint", &latest, "--tokens", "12"], more].concat());
    let lines = |text: String| -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let both = ["--prompt", "ROMEO:", "--prompt", "ROMEO:", "--prompts", &list];
    let objects = lines(sample(&[&both[..], &["--json"]].concat()));
    let prompts: Vec<&str> =
        objects.iter().map(|object| object["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["ROMEO:", "ROMEO:", "JULIET:", "A rose"]);
    for object in &objects {
        assert_eq!(object["ids"].as_array().unwrap().len(), 12);
        assert_eq!(
            (object["text"].as_str().unwrap().chars().count(), &object["end"]),
            (12, &"length".into())
        );
    }
    // The first equals that of a single prompt; each prompt has separate random numbers.
    assert_ne!(objects[0]["text"], objects[1]["text"]);
    let text = |object: &Value| {
        format!("{}{}", object["prompt"].as_str().unwrap(), object["text"].as_str().unwrap())
    };
    assert_eq!(sample(&["--prompt", "ROMEO:"]), text(&objects[0]) + "\n");
    let all: Vec<String> = objects.iter().map(text).collect();
    assert_eq!(sample(&both), all.join("\n\n") + "\n");

    // Stop at two characters that the continuation contains.
    let whole: Vec<char> = objects[2]["text"].as_str().unwrap().chars().collect();
    let stop: String = whole[4..6].iter().collect();
    let at = objects[2]["text"].as_str().unwrap().find(&stop).unwrap();
    let stopped =
        lines(sample(&[&both[..], &["--json", "--stop", "@@", "--stop", &stop]].concat()));
    assert_eq!(stopped[2]["text"].as_str().unwrap(), &objects[2]["text"].as_str().unwrap()[..at]);
    assert_eq!(stopped[2]["end"], "stop");
    assert!(stopped[2]["ids"].as_array().unwrap().len() <= 6);
}
