//! GPT-2 and Llama checkpoints saved by Hugging Face transformers: their logits, their bytes, and
//! files that are refused.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::bf16;
use hpctrain::backend::Backend as _;
use hpctrain::backend::cpu::Cpu;
use hpctrain::checkpoint::Reader;
use hpctrain::checkpoint::huggingface::{export, import};
use hpctrain::comm;
use hpctrain::config::network;
use hpctrain::data::Tokenizer;
use hpctrain::mesh::Mesh;
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::Zero;
use safetensors::{Dtype, SafeTensors, View};
use serde_json::Value;

use hpctrain_testkit::launch::{Ended, finish, inherits_nothing, program};
use hpctrain_testkit::python::python_with;
use hpctrain_testkit::runs::json;
use hpctrain_testkit::{Cut, engine, micro};

/// Returns a folder of `tests/golden/` with the output of `save_pretrained` and the logits.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn tiny() -> PathBuf {
    golden("hf-gpt2-tiny")
}

fn tiny_llama() -> PathBuf {
    golden("hf-llama-tiny")
}

/// Returns a model with RoPE scaling of type `llama3`, and a context of three times the original
/// one.
fn tiny_llama3() -> PathBuf {
    golden("hf-llama3-tiny")
}

/// Returns a model with RoPE scaling of type `linear`.
fn tiny_linear() -> PathBuf {
    golden("hf-llama-linear-tiny")
}

/// Returns the numbers in nested arrays.
fn flat(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(flat).collect(),
        value => vec![value.as_f64().unwrap()],
    }
}

/// Returns the engine's logits for `tokens`, with the parameters of the checkpoint in `dir`.
fn logits(dir: &Path, tokens: &[u32]) -> Vec<f32> {
    let mut reader = Reader::open(dir).unwrap();
    let network = network(&mut reader.manifest().config.model.clone(), None).unwrap();
    let one = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let mut engine = engine(&comm::single(), &network, one, Zero::Zero, rule, Cut::WHOLE, 1);
    let parameters =
        |name: &str, part, columns: Option<&Range<usize>>, range, out: &mut [f32]| match part {
            0 => reader.read(name, part, columns, range, out),
            _ => Ok(()),
        };
    engine.model.sharded.restore(parameters).unwrap();
    let micro = micro(&engine.model.backend, tokens, &[], network.context(), 0);
    let logits = engine.model.output(&micro).unwrap().unwrap();
    Cpu::all(&logits).to_vec()
}

#[test]
fn an_imported_model_computes_what_transformers_computes() {
    for there in [tiny(), tiny_llama(), tiny_llama3(), tiny_linear()] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("tiny");
        import(&there, &dir, None).unwrap();
        let golden = json(&there.join("logits.json"));
        let tokens: Vec<u32> = flat(&golden["tokens"]).into_iter().map(|id| id as u32).collect();
        let want = flat(&golden["logits"]);
        let got = logits(&dir, &tokens);
        assert_eq!(got.len(), want.len());
        let off = got
            .iter()
            .zip(&want)
            .map(|(got, want)| (f64::from(*got) - want).abs())
            .fold(0.0, f64::max);
        let size = want.iter().map(|logit| logit.abs()).fold(0.0, f64::max);
        assert!(off < 1e-5 && size > 1.0, "{}: {off:e} of {size}", there.display());
    }
}

#[test]
fn an_imported_model_is_exported_as_it_was() {
    // Our network has no attention dropout; the other keys are from other versions or other
    // classes.
    let llama = ["rope_theta", "rope_scaling", "torch_dtype"];
    for (there, ours) in [
        (tiny(), ["attn_pdrop", "n_ctx", "torch_dtype"]),
        (tiny_llama(), llama),
        (tiny_llama3(), llama),
        (tiny_linear(), llama),
    ] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("tiny");
        let out = root.path().join("out");
        import(&there, &dir, None).unwrap();
        export(&mut Reader::open(&dir).unwrap(), &out).unwrap();
        let [before, after] =
            [&there, &out].map(|dir| std::fs::read(dir.join("model.safetensors")).unwrap());
        let [before, after] = [&before, &after].map(|file| SafeTensors::deserialize(file).unwrap());
        assert_eq!(before.len(), after.len());
        for (name, tensor) in before.iter() {
            assert_eq!(after.tensor(name).unwrap(), tensor, "{name}");
        }
        let [before, after] = [&there, &out].map(|dir| json(&dir.join("config.json")));
        for (key, value) in
            after.as_object().unwrap().iter().filter(|(key, _)| !ours.contains(&key.as_str()))
        {
            assert_eq!(before[key], *value, "{key}");
        }
    }
}

/// Large models have several files; here the LM head is tied and omitted.
#[test]
fn a_llama_may_be_in_several_files() {
    let root = tempfile::tempdir().unwrap();
    let there = root.path().join("there");
    let dir = root.path().join("dir");
    let whole = root.path().join("whole");
    let mut model = Model::read(&tiny_llama());
    model.config["tie_word_embeddings"] = true.into();
    model.tensors.remove("lm_head.weight").unwrap();
    model.write(&whole);
    import(&whole, &root.path().join("reference"), None).unwrap();
    model.write(&there);
    std::fs::remove_file(there.join("model.safetensors")).unwrap();
    let mut parts: BTreeMap<String, BTreeMap<String, Raw>> = BTreeMap::new();
    for (i, (name, tensor)) in model.tensors.iter().enumerate() {
        let file = format!("model-0000{}-of-00003.safetensors", i % 3 + 1);
        parts.entry(file).or_default().insert(name.clone(), tensor.clone());
    }
    let mut map = serde_json::Map::new();
    for (file, tensors) in &parts {
        safetensors::serialize_to_file(tensors, None, &there.join(file)).unwrap();
        map.extend(tensors.keys().map(|name| (name.clone(), file.clone().into())));
    }
    let index = there.join("model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    import(&there, &dir, None).unwrap();
    let tokens: Vec<u32> = (0..12).collect();
    assert_eq!(logits(&dir, &tokens), logits(&root.path().join("reference"), &tokens));

    // A copy of a tensor in a file other than that in the index is ignored.
    let (name, tensor) = parts["model-00001-of-00003.safetensors"].clone().pop_first().unwrap();
    let other = parts.get_mut("model-00003-of-00003.safetensors").unwrap();
    other.insert(name.clone(), Raw(tensor.0, tensor.1.clone(), vec![0; tensor.2.len()]));
    safetensors::serialize_to_file(&*other, None, &there.join("model-00003-of-00003.safetensors"))
        .unwrap();
    import(&there, &root.path().join("copied"), None).unwrap();
    assert_eq!(
        logits(&root.path().join("copied"), &tokens),
        logits(&root.path().join("reference"), &tokens)
    );
    map[&name] = "model-00002-of-00003.safetensors".into();
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    let error = import(&there, &root.path().join("x"), None).unwrap_err().to_string();
    assert!(
        error.contains(&format!("model-00002-of-00003.safetensors has no tensor {name}\nhint: ")),
        "{error}"
    );

    std::fs::remove_file(there.join("model-00002-of-00003.safetensors")).unwrap();
    let error = import(&there, &root.path().join("x"), None).unwrap_err().to_string();
    assert!(
        error.contains("there is no file model-00002-of-00003.safetensors\nhint: copy all files"),
        "{error}"
    );
}

/// `save_pretrained` into the directory of a larger model leaves the index of that model, with or
/// without its files.
#[test]
fn one_file_comes_before_an_index() {
    let root = tempfile::tempdir().unwrap();
    let there = root.path().join("there");
    Model::tiny().write(&there);
    let index = there.join("model.safetensors.index.json");
    for name in ["model-00001-of-00002.safetensors", "other.safetensors"] {
        let mut stale = Model::tiny();
        stale.tensors.values_mut().for_each(|tensor| tensor.2.fill(0));
        safetensors::serialize_to_file(&stale.tensors, None, &there.join("other.safetensors"))
            .unwrap();
        let map: BTreeMap<&String, &str> =
            stale.tensors.keys().map(|tensor| (tensor, name)).collect();
        std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).unwrap();
        let out = root.path().join(name);
        let reference = root.path().join(format!("{name}-reference"));
        let imported = finish(program(["checkpoint", "import"]).arg(&there).arg("--out").arg(&out))
            .succeeded();
        let warning = "model.safetensors.index.json is not used: model.safetensors is there, too";
        assert!(imported.stderr.contains(warning), "{imported}");
        import(&tiny(), &reference, None).unwrap();
        let tokens: Vec<u32> = (0..12).collect();
        assert_eq!(logits(&out, &tokens), logits(&reference, &tokens));
    }
}

/// A tensor to write.
#[derive(Clone)]
struct Raw(Dtype, Vec<usize>, Vec<u8>);

impl View for &Raw {
    fn dtype(&self) -> Dtype {
        self.0
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.2[..]).into()
    }

    fn data_len(&self) -> usize {
        self.2.len()
    }
}

/// A copy of the tiny model, to be modified.
struct Model {
    config: Value,
    tensors: BTreeMap<String, Raw>,
}

impl Model {
    fn tiny() -> Self {
        Self::read(&tiny())
    }

    fn read(dir: &Path) -> Self {
        let file = std::fs::read(dir.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let raw = |(name, tensor): (&str, safetensors::tensor::TensorView<'_>)| {
            (name.to_owned(), Raw(tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))
        };
        Self { config: json(&dir.join("config.json")), tensors: tensors.iter().map(raw).collect() }
    }

    fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        safetensors::serialize_to_file(&self.tensors, None, &dir.join("model.safetensors"))
            .unwrap();
    }
}

/// Files of 2019 have names without `transformer.`, buffers, and a copy of the LM head; here also
/// in bfloat16.
#[test]
fn other_spellings_are_understood() {
    let root = tempfile::tempdir().unwrap();
    let there = root.path().join("there");
    let dir = root.path().join("dir");
    let reference = root.path().join("reference");
    let mut model = Model::tiny();
    let narrow = |bytes: &[u8]| -> Vec<u8> {
        let wide = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        wide.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    model.tensors = std::mem::take(&mut model.tensors)
        .into_iter()
        .map(|(name, Raw(_, shape, bytes))| {
            (
                name.strip_prefix("transformer.").unwrap().to_owned(),
                Raw(Dtype::BF16, shape, narrow(&bytes)),
            )
        })
        .collect();
    model.tensors.insert("lm_head.weight".into(), model.tensors["wte.weight"].clone());
    model.tensors.insert("h.0.attn.bias".into(), Raw(Dtype::U8, vec![1, 1, 12, 12], vec![1; 144]));
    model.tensors.insert("h.0.attn.masked_bias".into(), Raw(Dtype::F32, vec![], vec![0; 4]));
    model.write(&there);
    import(&there, &dir, None).unwrap();
    import(&tiny(), &reference, None).unwrap();
    let [mut narrow, mut wide] = [&dir, &reference].map(|dir| Reader::open(dir).unwrap());
    for (name, entry) in wide.manifest().tensors.clone() {
        let mut values =
            [vec![0.0; entry.shape.iter().product()], vec![0.0; entry.shape.iter().product()]];
        narrow.read(&name, 0, None, 0..values[0].len(), &mut values[0]).unwrap();
        wide.read(&name, 0, None, 0..values[1].len(), &mut values[1]).unwrap();
        let [narrow, wide] = values;
        assert!(
            narrow.iter().zip(wide).all(|(narrow, wide)| *narrow == bf16::from_f32(wide).to_f32()),
            "{name}"
        );
    }
}

#[test]
fn other_models_are_refused() {
    type Change = fn(&mut Model);
    let cases: [(Change, &[&str]); 17] = [
        (
            |m| {
                m.config["quantization_config"] =
                    serde_json::json!({ "quant_method": "gptq", "bits": 4 })
            },
            &["config.json: quantization_config is gptq: weights are quantized"],
        ),
        (
            |m| {
                let wrapped = std::mem::take(&mut m.tensors).into_iter();
                m.tensors =
                    wrapped.map(|(name, tensor)| (format!("_orig_mod.{name}"), tensor)).collect();
            },
            &[
                "there is no tensor h.0.attn.c_attn.bias, h.0.attn.c_attn.weight, h.0.attn.c_proj.bias and 25 more",
                "hint: all names begin with \"_orig_mod.\": save the module that it wraps",
            ],
        ),
        (
            |m| {
                let bias = m.tensors.get_mut("transformer.h.1.ln_1.bias").unwrap();
                bias.2[20..24].copy_from_slice(&f32::NAN.to_le_bytes());
            },
            &[
                "transformer.h.1.ln_1.bias has 1 of 24 values that are not finite, the first of them NaN at 5",
            ],
        ),
        (
            |m| m.config["model_type"] = "bert".into(),
            &["config.json", "model_type is \"bert\", not \"gpt2\" or \"llama\""],
        ),
        (
            |m| drop(m.config.as_object_mut().unwrap().remove("model_type")),
            &["model_type is missing"],
        ),
        (
            |m| drop(m.config.as_object_mut().unwrap().remove("n_layer")),
            &["config.json", "n_layer"],
        ),
        (|m| m.config["activation_function"] = "relu".into(), &["activation_function is \"relu\""]),
        (
            |m| m.config["layer_norm_epsilon"] = 1e-6.into(),
            &["layer_norm_epsilon is 0.000001, must be 0.00001"],
        ),
        (|m| m.config["n_inner"] = 100.into(), &["n_inner is 100, must be four times n_embd = 24"]),
        (|m| m.config["tie_word_embeddings"] = false.into(), &["tie_word_embeddings is false"]),
        (|m| m.config["n_head"] = 5.into(), &["config.json", "24", "5"]),
        (
            |m| m.config["vocab_size"] = 42.into(),
            &["model.safetensors: transformer.wte.weight is [41, 24], by config.json [42, 24]"],
        ),
        (
            |m| drop(m.tensors.remove("transformer.h.1.ln_1.bias")),
            &["model.safetensors: there is no tensor transformer.h.1.ln_1.bias"],
        ),
        (
            |m| {
                drop(m.tensors.insert(
                    "transformer.h.2.ln_1.bias".into(),
                    Raw(Dtype::F32, vec![1], vec![0; 4]),
                ))
            },
            &["GPT-2 has no tensor transformer.h.2.ln_1.bias"],
        ),
        (
            |m| {
                m.tensors.retain(|name, _| !name.starts_with("transformer.h.0.ln_"));
                m.tensors.insert("transformer.x".into(), Raw(Dtype::F32, vec![1], vec![0; 4]));
                m.tensors.insert("y".into(), Raw(Dtype::F32, vec![1], vec![0; 4]));
                m.tensors.get_mut("transformer.ln_f.bias").unwrap().1 = vec![2, 12];
            },
            &[
                "no tensor transformer.h.0.ln_1.bias, transformer.h.0.ln_1.weight, transformer.h.0.ln_2.bias and 1 more; \
                 transformer.ln_f.bias is [2, 12], by config.json [24]; GPT-2 has no tensor transformer.x, y",
            ],
        ),
        (
            |m| {
                drop(
                    m.tensors.insert("lm_head.weight".into(), Raw(Dtype::F32, vec![1], vec![0; 4])),
                )
            },
            &["lm_head.weight differs from transformer.wte.weight, to which config.json ties it"],
        ),
        (
            |m| m.tensors.get_mut("transformer.ln_f.bias").unwrap().0 = Dtype::I32,
            &["transformer.ln_f.bias is of type I32"],
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let refused = |dir: &Path, words: &[&str]| {
        let args = [Path::new("checkpoint"), "import".as_ref(), dir, "--out".as_ref(), &out];
        let ended = finish(&mut program(args));
        assert_eq!(ended.code(), 2, "{ended}");
        assert_eq!(ended.stderr.matches("error: ").count(), 1, "{ended}");
        assert!(ended.stderr.contains("\nhint: "), "{ended}");
        for word in words {
            assert!(ended.stderr.contains(word), "{word:?} is missing: {ended}");
        }
        assert!(!out.exists());
    };
    for (i, (change, words)) in cases.into_iter().enumerate() {
        let dir = root.path().join(i.to_string());
        let mut model = Model::tiny();
        change(&mut model);
        model.write(&dir);
        refused(&dir, words);
    }
    let dir = root.path().join("cut");
    Model::tiny().write(&dir);
    let file = dir.join("model.safetensors");
    let content = std::fs::read(&file).unwrap();
    std::fs::write(&file, &content[..content.len() - 1]).unwrap();
    refused(&dir, &["model.safetensors: not a whole safetensors file"]);
    std::fs::remove_file(&file).unwrap();
    refused(&dir, &["model.safetensors does not exist"]);
    refused(&root.path().join("nowhere"), &["nowhere/config.json"]);
    // Nothing half written is left.
    let left = std::fs::read_dir(root.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name() != "cut");
    assert_eq!(left.count(), 17);
}

#[test]
fn other_llamas_are_refused() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 16] = [
        (|c| c["hidden_act"] = "gelu".into(), "hidden_act is \"gelu\", must be \"silu\""),
        (|c| c["attention_bias"] = true.into(), "attention_bias is true, must be false"),
        (|c| c["head_dim"] = 8.into(), "head_dim is 8, must be hidden_size / num_attention_heads"),
        (
            |c| c["rope_parameters"]["rope_type"] = "yarn".into(),
            "rope_parameters: rope_type is \"yarn\", must be one of \"default\", \"linear\", \"llama3\"",
        ),
        (
            |c| c["rope_scaling"] = serde_json::json!({ "type": "dynamic", "factor": 2.0 }),
            "rope_scaling: rope_type is \"dynamic\"",
        ),
        (
            |c| {
                c["rope_scaling"] = serde_json::json!({ "type": "longrope", "rope_type": "longrope", "factor": 2.0 })
            },
            "rope_scaling: rope_type is \"longrope\"",
        ),
        (
            |c| c["rope_parameters"]["rope_type"] = "llama3".into(),
            "config.json: model.rope_scaling.rope_type = llama3, but model.rope_scaling.factor is missing\nhint: ",
        ),
        (
            |c| c["rope_parameters"] = serde_json::json!({ "rope_type": "linear", "factor": 0.5 }),
            "config.json: model.rope_scaling.factor = 0.5 is out of range\nhint: model.rope_scaling.factor must be at least 1",
        ),
        (
            |c| c["rope_parameters"]["factor"] = 2.0.into(),
            "model.rope_scaling.factor is given, but model.rope_scaling.rope_type = default does not use it",
        ),
        (
            |c| c["rope_scaling"] = serde_json::json!({ "rope_type": "linear", "factor": 2.0 }),
            "rope_type is \"linear\" in rope_scaling and \"default\" in rope_parameters",
        ),
        (
            |c| {
                c["rope_parameters"] = serde_json::json!({ "rope_type": "linear", "factor": 4.0 });
                c["rope_scaling"] = serde_json::json!({ "type": "linear", "factor": 2.0 });
            },
            "factor is 2 in rope_scaling and 4 in rope_parameters",
        ),
        (
            |c| {
                c["original_max_position_embeddings"] = 6.into();
                c["rope_parameters"] = serde_json::json!({
                    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8,
                });
            },
            "original_max_position_embeddings is 6, but 8 in the RoPE parameters",
        ),
        (
            |c| c["rope_parameters"]["partial_rotary_factor"] = 0.5.into(),
            "rope_parameters: partial_rotary_factor is 0.5, which is not supported",
        ),
        (
            |c| {
                c["rope_parameters"]["rope_theta"] = 10000.0.into();
                c["rope_scaling"] =
                    serde_json::json!({ "rope_type": "default", "rope_theta": 500000.0 });
            },
            "rope_theta is 500000 in rope_scaling and 10000 in rope_parameters",
        ),
        (
            |c| c["num_key_value_heads"] = 3.into(),
            "model.kv_heads = 3 does not divide model.heads = 4",
        ),
        (
            |c| c["tie_word_embeddings"] = true.into(),
            "lm_head.weight differs from model.embed_tokens.weight, to which config.json ties it",
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    for (i, (change, wanted)) in cases.into_iter().enumerate() {
        let dir = root.path().join(i.to_string());
        let out = root.path().join("out");
        let mut model = Model::read(&tiny_llama());
        change(&mut model.config);
        model.write(&dir);
        let error = import(&dir, &out, None).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(wanted), "{error}");
        assert!(!out.exists());
    }
}

#[test]
fn the_base_of_angles_is_read_where_it_is_given() {
    type Change = fn(&mut serde_json::Map<String, Value>);
    let cases: [(Change, f64); 4] = [
        (|c| drop(c.insert("rope_theta".into(), 20000.0.into())), 20000.0),
        (
            |c| {
                c.insert("rope_theta".into(), 20000.0.into());
                c.insert(
                    "rope_scaling".into(),
                    serde_json::json!({ "rope_type": "default", "rope_theta": 500000.0 }),
                );
            },
            500_000.0,
        ),
        (
            |c| {
                drop(c.insert(
                    "rope_scaling".into(),
                    serde_json::json!({ "type": "default", "rope_theta": 30000.0 }),
                ))
            },
            30000.0,
        ),
        (
            |c| {
                drop(c.insert(
                    "rope_parameters".into(),
                    serde_json::json!({ "rope_theta": 40000.0, "factor": null }),
                ))
            },
            40000.0,
        ),
    ];
    let root = tempfile::tempdir().unwrap();
    for (i, (change, theta)) in cases.into_iter().enumerate() {
        let dir = root.path().join(i.to_string());
        let out = root.path().join(format!("out-{i}"));
        let mut model = Model::read(&tiny_llama());
        let config = model.config.as_object_mut().unwrap();
        for key in ["rope_theta", "rope_scaling", "rope_parameters"] {
            config.remove(key);
        }
        change(config);
        model.write(&dir);
        let manifest = import(&dir, &out, None).unwrap();
        assert_eq!(manifest.config.model.rope_theta, Some(theta));
    }
}

/// RoPE scaling as in files of `transformers` 4, with the old or the new name of the type, and as
/// in our exports, in both spellings.
#[test]
fn scaled_positions_are_read_where_they_are_given() {
    type Change = fn(&mut Value, Value);
    let cases: [Change; 4] = [
        |c, scaling| c["rope_scaling"] = scaling,
        |c, mut scaling| {
            let map = scaling.as_object_mut().unwrap();
            let name = map.remove("rope_type").unwrap();
            map.insert("type".into(), name);
            c["rope_scaling"] = scaling;
        },
        |c, scaling| c["rope_parameters"] = scaling,
        |c, scaling| {
            c["rope_scaling"] = scaling.clone();
            c["rope_parameters"] = scaling;
        },
    ];
    let root = tempfile::tempdir().unwrap();
    for (name, there) in [("llama3", tiny_llama3()), ("linear", tiny_linear())] {
        let reference = import(&there, &root.path().join(name), None).unwrap().config.model;
        assert_eq!(reference.rope_scaling.rope_type.name(), name);
        for (i, change) in cases.into_iter().enumerate() {
            let dir = root.path().join(format!("{name}-{i}"));
            let out = root.path().join(format!("{name}-out-{i}"));
            let mut model = Model::read(&there);
            let config = model.config.as_object_mut().unwrap();
            let mut scaling = config.remove("rope_parameters").unwrap();
            config.insert(
                "rope_theta".into(),
                scaling.as_object_mut().unwrap().remove("rope_theta").unwrap(),
            );
            change(&mut model.config, scaling);
            model.write(&dir);
            assert_eq!(import(&dir, &out, None).unwrap().config.model, reference, "{name}, {i}");
        }
    }
}

/// From training to an export to an import, whose printed command trains it with the same
/// positions.
#[test]
fn scaled_positions_travel() {
    let folder = Folder(tempfile::tempdir().unwrap());
    std::fs::write(folder.at("text"), "A text about the sea, and of ships.\n".repeat(40)).unwrap();
    folder.ran("data import text @text --tokenizer byte --out @data");
    let scaling = "--set model.kind=llama --set model.rope_scaling.rope_type=llama3 --set model.rope_scaling.low_freq_factor=1 \
                   --set model.rope_scaling.high_freq_factor=4 --set model.rope_scaling.original_max_position_embeddings=12";
    folder.train(
        "x",
        &format!("{scaling} --set model.rope_scaling.factor=8 --set optimizer.lr=0.02"),
    );
    folder.ran("checkpoint export @runs/x --out @there");
    let config = json(&Path::new(&folder.at("there")).join("config.json"));
    let mut parameters = serde_json::json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    });
    assert_eq!((&config["rope_scaling"], &config["rope_theta"]), (&parameters, &10000.0.into()));
    parameters["rope_theta"] = 10000.0.into();
    assert_eq!(config["rope_parameters"], parameters);

    let imported = folder.ran("checkpoint import @there --out @back");
    let sampled = |checkpoint: &str| {
        folder
            .ran(&format!(
                "sample --checkpoint {checkpoint} --prompt sea --tokens 18 --temperature 0"
            ))
            .stdout
    };
    assert_eq!(sampled("@back"), sampled("@runs/x"));
    let command =
        imported.stdout.lines().find_map(|line| line.strip_prefix("train it: hpctrain ")).unwrap();
    assert!(command.contains(" --set model.rope_scaling.rope_type=llama3"), "{command}");
    let more = "--set run.steps=1 --set batch.global=4 --set eval.samples=4 --set log.sample_tokens=0 --set run.root=@runs";
    folder.ran(&format!(
        "{} {more} --set run.name=tuned",
        command.replace("DIR", &folder.at("data"))
    ));
    let [before, after] = ["runs/x", "runs/tuned"].map(|run| {
        let text = std::fs::read_to_string(Path::new(&folder.at(run)).join("config.toml")).unwrap();
        text.parse::<toml::Table>().unwrap()["model"]["rope_scaling"].clone()
    });
    assert_eq!(before, after);
}

/// The commands that an import prints work: they import text, and train and evaluate the network on
/// it. Text of another tokenizer is refused.
#[test]
fn what_an_import_prints_works() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name).display().to_string();
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let ran = |line: String| {
        let words = line.replace("FILE", readme);
        finish(&mut program(words.split_whitespace()))
    };
    let small = "--set model.layers=1 --set model.width=16 --set model.heads=2 --set model.context=8 --set batch.global=4 \
                 --set run.steps=2 --set log.sample_tokens=0 --set eval.samples=4 --set checkpoint.every=0";
    let runs = format!("--set run.root={}", at("runs"));
    let bytes = format!("--set data.path={}", at("bytes"));
    ran(format!("data import text FILE --tokenizer byte --out {}", at("bytes"))).succeeded();
    ran(format!("data import text FILE --tokenizer char --out {}", at("chars"))).succeeded();
    ran(format!("train {small} {runs} {bytes} --set run.name=base --set model.dropout=0.1"))
        .succeeded();
    ran(format!("checkpoint export {} --out {}", at("runs/base"), at("there"))).succeeded();
    let ended =
        ran(format!("checkpoint import {} --tokenizer byte --out {}", at("there"), at("back")))
            .succeeded();
    let line = |name: &str| {
        let line = ended
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_else(|| panic!("{ended}"));
        line.strip_prefix(" hpctrain ").unwrap_or_else(|| panic!("{ended}")).to_owned()
    };
    let import = line("import text for it:");
    let train = line("train it:");
    let measure = line("measure it:");
    assert!(
        train.contains(" --set data.path=DIR ") && train.contains(" --set model.dropout=0.1 "),
        "{train}"
    );
    ran(import.replace("DIR", &at("text"))).succeeded();
    let more = |name: &str| {
        format!(
            "{runs} --set run.name={name} --set run.steps=1 --set batch.global=4 --set eval.samples=4 --set log.sample_tokens=0"
        )
    };
    ran(format!("{} {}", train.replace("DIR", &at("text")), more("tuned"))).succeeded();
    let ended = ran(measure.replace("DIR", &at("text"))).succeeded();
    assert!(ended.stdout.contains(": loss ") && ended.stdout.contains("perplexity"), "{ended}");
    for command in [
        format!("{} {}", train.replace("DIR", &at("chars")), more("refused")),
        measure.replace("DIR", &at("chars")),
    ] {
        let ended = ran(command);
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(
            ended
                .stderr
                .contains("the tokenizer of the data is char, that of the network byte\nhint: "),
            "{ended}"
        );
    }
    // The tokenizer of a model without one is not known: that of the data is used, with a message.
    ran(format!("checkpoint import {} --tokenizer none --out {}", at("there"), at("untold")))
        .succeeded();
    let ended =
        ran(format!("eval --checkpoint {} --data {}", at("untold"), at("bytes"))).succeeded();
    assert!(
        ended
            .stderr
            .contains("the checkpoint does not record its tokenizer: using that of the data, byte"),
        "{ended}"
    );
    // The training data of an import is not known: no other data is measured by chance.
    let ended = ran(format!("eval --checkpoint {}", at("back")));
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(
        ended.stderr.contains("so its training data is not known\nhint: give data with --data"),
        "{ended}"
    );
}

/// A folder of runs, data and models, and commands in it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Runs a command line, in which `@` stands for the folder.
    fn ends(&self, line: &str) -> Ended {
        let words = line.replace('@', &self.at(""));
        finish(&mut program(words.split_whitespace()))
    }

    #[track_caller]
    fn ran(&self, line: &str) -> Ended {
        self.ends(line).succeeded()
    }

    /// Trains a small network on `@data`.
    fn train(&self, name: &str, more: &str) {
        self.ran(&format!(
            "train --set model.layers=1 --set model.width=16 --set model.heads=2 --set model.context=24 --set batch.global=4 \
             --set run.steps=3 --set log.sample_tokens=0 --set eval.samples=4 --set run.root=@runs --set run.name={name} \
             --set data.path=@data {more}"
        ));
    }
}

/// From data to checkpoints to exports to imports: the tokenizer of a file comes along, and the
/// token that ends a text.
#[test]
fn tokenizers_of_files_travel() {
    let folder = Folder(tempfile::tempdir().unwrap());
    let mut file: Value = serde_json::from_str(&Tokenizer::Byte.file().unwrap()).unwrap();
    file["normalizer"] = serde_json::json!({ "type": "NFC" });
    file["added_tokens"] = serde_json::json!([{
        "id": 256, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    }]);
    std::fs::write(folder.at("tokenizer.json"), file.to_string()).unwrap();
    std::fs::write(folder.at("text"), "A text about the sea, and of ships. ".repeat(40)).unwrap();
    folder.ran(
        "data import text @text --tokenizer @tokenizer.json --end-of-text <|end|> --out @data",
    );
    folder.ran("data import text @text --tokenizer byte --out @bytes");
    folder.train("x", "");
    let sampled = |checkpoint: &str| {
        folder
            .ran(&format!(
                "sample --checkpoint {checkpoint} --prompt e\u{301} --tokens 12 --temperature 0"
            ))
            .stdout
    };
    let before = sampled("@runs/x");
    assert!(before.starts_with("e\u{301}"), "{before}");
    let ended = folder.ends("eval --checkpoint @runs/x --data @bytes");
    let refused =
        "the tokenizer of the data is byte, that of the network huggingface with 257 ids\nhint: ";
    assert!(ended.code() == 2 && ended.stderr.contains(refused), "{ended}");
    assert!(folder.ran("checkpoint inspect @runs/x").stdout.contains("huggingface, 257 ids"));

    let ended = folder.ran("checkpoint export @runs/x --out @there");
    assert!(ended.stdout.contains("tokenizer huggingface"), "{ended}");
    let there = |name: &str| json(&Path::new(&folder.at("there")).join(name));
    assert_eq!(there("tokenizer.json"), file);
    let end = Value::from(256);
    let settings = there("tokenizer_config.json");
    assert_eq!((&settings["eos_token"], &settings["bos_token"]), (&"<|end|>".into(), &Value::Null));
    assert_eq!(there("generation_config.json")["eos_token_id"], end);
    assert_eq!(there("generation_config.json")["max_length"], 24);
    assert_eq!(
        (&there("config.json")["eos_token_id"], &there("config.json")["bos_token_id"]),
        (&end, &Value::Null)
    );

    let ended = folder.ran("checkpoint import @there --out @back");
    assert!(ended.stdout.contains("there/tokenizer.json --out DIR"), "{ended}");
    assert_eq!(sampled("@back"), before);
    folder.ran("eval --checkpoint @back --data @data");
    // As it came, once more; and without.
    folder.ran("checkpoint export @back --out @again");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
    {
        assert_eq!(json(&Path::new(&folder.at("again")).join(name)), there(name), "{name}");
    }
    folder.ran("checkpoint import @there --tokenizer none --out @without");
    let ended = folder.ran("checkpoint export @without --out @bare");
    assert!(ended.stdout.contains("no tokenizer"), "{ended}");
    let bare = Path::new(&folder.at("bare")).to_owned();
    assert!(!bare.join("tokenizer.json").exists() && bare.join("generation_config.json").exists());

    // A tokenizer with ids that the model does not know.
    file["added_tokens"][0]["id"] = 300.into();
    file["model"]["vocab"]["<|end|>"] = 300.into();
    std::fs::write(folder.at("there/tokenizer.json"), file.to_string()).unwrap();
    let ended = folder.ends("checkpoint import @there --out @more");
    let wanted = "the tokenizer huggingface has 301 ids, the model only 257\nhint: ";
    assert!(ended.code() == 2 && ended.stderr.contains(wanted), "{ended}");
    std::fs::write(folder.at("there/tokenizer.json"), "{").unwrap();
    let ended = folder.ends("checkpoint import @there --out @more");
    assert!(
        ended.code() == 2
            && ended.stderr.contains("there/tokenizer.json is not a valid tokenizer.json: "),
        "{ended}"
    );
}

/// The tokens that begin and end a text count as in transformers: a prompt of an imported model
/// begins with the one, a continuation ends at the other.
#[test]
fn samples_begin_and_end_as_the_tokenizer_says() {
    let folder = Folder(tempfile::tempdir().unwrap());
    let mut file: Value = serde_json::from_str(&Tokenizer::Byte.file().unwrap()).unwrap();
    let special = |id: u32, content: &str| {
        serde_json::json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true,
        })
    };
    file["added_tokens"] = serde_json::json!([special(256, "<|end|>"), special(257, "<|begin|>")]);
    std::fs::write(folder.at("tokenizer.json"), file.to_string()).unwrap();
    std::fs::create_dir(folder.at("texts")).unwrap();
    for text in 0..200 {
        std::fs::write(folder.at(&format!("texts/{text}.txt")), "ab").unwrap();
    }
    folder.ran(
        "data import text @texts --tokenizer @tokenizer.json --end-of-text <|end|> --out @data",
    );
    folder.train("x", "--set run.steps=80 --set optimizer.lr=0.02 --set lr_schedule.warmup=2");
    let sampled = |words: &str| -> Value {
        let line = format!("sample --tokens 8 --temperature 0 --json --checkpoint {words}");
        serde_json::from_str(&folder.ran(&line).stdout).unwrap()
    };
    let ended = sampled("@runs/x --prompt a");
    assert_eq!((&ended["text"], &ended["end"]), (&"b".into(), &"eos".into()), "{ended}");
    assert_eq!(ended["ids"].as_array().unwrap().last(), Some(&256.into()), "{ended}");
    let whole = sampled("@runs/x --prompt a --ignore-eos");
    assert!(whole["ids"].as_array().unwrap().len() == 8 && whole["end"] == "length", "{whole}");
    assert!(whole["text"].as_str().unwrap().starts_with("b<|end|>"), "{whole}");

    folder.ran("checkpoint export @runs/x --out @there");
    let path = folder.at("there/tokenizer_config.json");
    let mut settings = json(Path::new(&path));
    settings["bos_token"] = "<|begin|>".into();
    std::fs::write(&path, settings.to_string()).unwrap();
    let ids = |checkpoint: &str, prompt: &str| {
        sampled(&format!("{checkpoint} --ignore-eos --prompt {prompt}"))["ids"].clone()
    };
    let behind = ids("@runs/x", "<|begin|>b");
    assert_ne!(behind, ids("@runs/x", "b"), "the token makes no difference to this model");
    // Nothing says that a text begins with it.
    folder.ran("checkpoint import @there --out @plain");
    assert_eq!(ids("@plain", "b"), ids("@runs/x", "b"));
    settings["add_bos_token"] = true.into();
    std::fs::write(&path, settings.to_string()).unwrap();
    folder.ran("checkpoint import @there --out @settings");
    assert_eq!(
        (ids("@settings", "b"), ids("@settings", "<|begin|>b")),
        (behind.clone(), behind.clone())
    );
    settings["add_bos_token"] = false.into();
    std::fs::write(&path, settings.to_string()).unwrap();
    file["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [257], "tokens": ["<|begin|>"]}},
    });
    std::fs::write(folder.at("there/tokenizer.json"), file.to_string()).unwrap();
    folder.ran("checkpoint import @there --out @processed");
    assert_eq!(ids("@processed", "b"), behind);
}

/// An export is all that transformers needs, and continues a text as `sample` does. A tokenizer of
/// characters is the same again after an import.
#[test]
fn transformers_continue_a_text() {
    let folder = Folder(tempfile::tempdir().unwrap());
    std::fs::write(folder.at("text"), "A text about the sea, and of ships.\n".repeat(40)).unwrap();
    for (tokenizer, kind) in [("char", "gpt"), ("byte", "llama"), ("char", "llama")] {
        let name = format!("{tokenizer}-{kind}");
        folder.ran(&format!("data import text @text --tokenizer {tokenizer} --out @{name}-data"));
        folder.train(
            &name,
            &format!(
                "--set model.kind={kind} --set data.path=@{name}-data --set optimizer.lr=0.02"
            ),
        );
        folder.ran(&format!("checkpoint export @runs/{name} --out @{name}"));
        folder.ran(&format!("checkpoint import @{name} --out @{name}-back"));
        // The data's tokenizer is the model's.
        folder.ran(&format!("eval --checkpoint @{name}-back --data @{name}-data"));
        let Some(mut python) = python_with("torch, transformers") else {
            println!("SKIPPED: no Python with torch and transformers, so no pipeline reads {name}");
            continue;
        };
        let script = "import sys, transformers\n\
            texts = transformers.pipeline('text-generation', model=sys.argv[1])\n\
            texts('A text')\n\
            print(texts('A text', max_new_tokens=12, do_sample=False)[0]['generated_text'], end='')";
        let continued =
            inherits_nothing(python.args(["-c", script, &folder.at(&name)])).output().unwrap();
        assert!(continued.status.success(), "{}", String::from_utf8_lossy(&continued.stderr));
        let ours = finish(
            program(["sample", "--checkpoint", &folder.at(&format!("runs/{name}"))]).args([
                "--prompt",
                "A text",
                "--tokens",
                "12",
                "--temperature",
                "0",
            ]),
        )
        .succeeded()
        .stdout;
        assert_eq!(String::from_utf8_lossy(&continued.stdout).into_owned() + "\n", ours, "{name}");
    }
}
