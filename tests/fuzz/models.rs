//! Directories in the format of Hugging Face's `save_pretrained`.

use hpctrain::checkpoint::huggingface;
use hpctrain::data::Tokenizer;

use super::harness::fuzz;
use super::mutate::Form;
use super::samples::sample;
use hpctrain_testkit::runs::copy;

/// Imports the sample model with one file replaced by each input.
fn import(reader: &str, file: &str, form: Form, seed: Vec<u8>) {
    let root = tempfile::tempdir().unwrap();
    copy(&sample().model, root.path());
    let from = root.path().join("model");
    let out = root.path().join("out");
    fuzz(reader, form, &[seed], |input| {
        std::fs::write(from.join(file), input).unwrap();
        let imported = huggingface::import(&from, &out, None);
        let _ = std::fs::remove_dir_all(&out);
        match imported {
            Ok(_) => true,
            Err(e) => {
                assert_eq!(e.exit_code(), 2, "{e}");
                false
            }
        }
    });
}

#[test]
fn tokenizers_are_read() {
    let root = tempfile::tempdir().unwrap();
    let mut file: serde_json::Value =
        serde_json::from_str(&Tokenizer::Byte.file().unwrap()).unwrap();
    file["normalizer"] = serde_json::json!({ "type": "NFC" });
    file["model"]["vocab"].as_object_mut().unwrap().retain(|token, _| token.is_ascii());
    let settings = serde_json::json!({ "eos_token": { "content": "a" }, "bos_token": "b", "eos_token_id": [5, 6] });
    for (reader, name) in [("tokenizer", "tokenizer.json"), ("settings", "tokenizer_config.json")] {
        std::fs::write(root.path().join("tokenizer.json"), file.to_string()).unwrap();
        let seed = if name == "tokenizer.json" { file.to_string() } else { settings.to_string() };
        fuzz(reader, Form::Json, &[seed.into_bytes()], |input| {
            std::fs::write(root.path().join(name), input).unwrap();
            let read = huggingface::tokenizer(root.path());
            let read = read.and_then(|tokenizer| {
                tokenizer.map(|tokenizer| tokenizer.encode("a text")).transpose()
            });
            read.map_err(|e| assert_eq!(e.exit_code(), 2, "{e}")).is_ok()
        });
    }
}

#[test]
fn tensors_are_read() {
    let seed = std::fs::read(sample().model.join("model.safetensors")).unwrap();
    import("safetensors", "model.safetensors", Form::JsonHeader, seed);
}

#[test]
fn descriptions_of_models_are_read() {
    let seed = std::fs::read(sample().model.join("config.json")).unwrap();
    import("config.json", "config.json", Form::Json, seed);
}

#[test]
fn indices_of_models_are_read() {
    let names = ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"];
    let map: serde_json::Map<String, serde_json::Value> =
        names.iter().map(|name| (name.to_string(), "model.safetensors".into())).collect();
    let seed = serde_json::json!({"metadata": {"total_size": 1234}, "weight_map": map}).to_string();
    import("index", "model.safetensors.index.json", Form::Json, seed.into_bytes());
}
