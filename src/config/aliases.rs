//! Aliases of keys: names that mean exactly the same are read, similar ones are named in errors.

use std::collections::BTreeMap;

use toml::{Table, Value};

use hpctrain_base::error::{Error, Result};

/// A key, and its names in other programs: the last part of the name, in lower case, without `_`
/// and `-`.
struct Names {
    key: &'static str,
    /// Names of the same quantity in the same unit, which are read like the key itself.
    exact: &'static [&'static str],
    /// Names that mean something similar: a value for them may be wrong here.
    similar: &'static [&'static str],
}

const fn names(
    key: &'static str,
    exact: &'static [&'static str],
    similar: &'static [&'static str],
) -> Names {
    Names { key, exact, similar }
}

#[rustfmt::skip]
const KEYS: [Names; 44] = [
    names("run.steps", &["maxsteps", "maxiters", "numsteps", "totalsteps", "trainsteps", "iterations"], &[]),
    names("run.epochs", &["numepochs", "maxepochs", "nepochs", "numtrainepochs"], &[]),
    names("run.steps_per_epoch", &["epochsteps", "itersperepoch", "iterationsperepoch"], &["limittrainbatches"]),
    names("run.name", &["runname", "experiment", "expname", "jobname"], &[]),
    names("run.root", &[], &["outputdir", "outdir", "savedir", "logdir"]),
    names("run.seed", &["randomseed", "manualseed"], &[]),
    names("model.layers", &["nlayer", "nlayers", "numlayers", "numhiddenlayers", "depth", "nblocks", "numblocks"], &[]),
    names("model.heads", &["nhead", "nheads", "numheads", "numattentionheads"], &[]),
    names("model.kv_heads", &["nkvhead", "nkvheads", "numkvheads", "numkeyvalueheads"], &[]),
    names("model.width", &["nembd", "dmodel", "modeldim", "dim", "hiddensize", "hiddendim", "embeddim", "embeddingdim", "embedsize"], &[]),
    names("model.hidden", &["intermediatesize", "ffndim", "dff", "ninner", "mlpdim", "ffnhiddensize"], &[]),
    names("model.context", &["blocksize", "seqlen", "seqlength", "sequencelength", "maxseqlen", "contextlength", "contextsize", "nctx", "npositions", "maxpositionembeddings"], &["maxlength"]),
    names("model.vocabulary", &["vocab", "vocabsize", "nvocab", "vocabularysize"], &["numtokens"]),
    names("model.dropout", &["dropoutrate", "pdropout"], &["residpdrop", "embdpdrop", "hiddendropoutprob"]),
    names("model.norm_epsilon", &["rmsnormeps", "layernormepsilon", "normeps"], &[]),
    names("model.rope_scaling", &[], &["ropeparameters"]),
    names("model.tied", &["tiewordembeddings", "tieembeddings"], &[]),
    names("data.path", &["dataset", "datadir", "datapath", "datasetpath"], &["trainfile", "traindata"]),
    names("data.order", &[], &["autoshardpolicy", "autoshard", "shardpolicy"]),
    names("data.prefetch", &[], &["numworkers", "prefetchfactor"]),
    names("batch.global", &["globalbatchsize"], &["batchsize", "trainbatchsize", "bs"]),
    names("batch.per_rank", &["perreplica", "batchsizeperreplica", "perreplicabatchsize"], &["perdevicetrainbatchsize", "perdevicebatchsize", "pergpubatchsize", "pergputrainbatchsize", "localbatchsize", "batchsizepergpu", "samplespergpu", "perdevice", "pergpu"]),
    names("batch.micro", &["microbatch", "microbatchsize"], &["gradientaccumulationsteps", "gradaccumsteps", "gradaccum", "accumulategradbatches", "devicebatchsize"]),
    names("optimizer.lr", &["learningrate", "baselr", "maxlr", "peaklr"], &[]),
    names("optimizer.kind", &["optim", "optimizername", "optimizertype"], &[]),
    names("optimizer.weight_decay", &["wd"], &["decay", "l2"]),
    names("optimizer.grad_clip", &["maxgradnorm", "gradientclipval", "gradnormclip", "gradclipnorm", "clipgrad", "clipnorm", "gradientclipping"], &["clip"]),
    names("optimizer.eps", &["epsilon", "adamepsilon", "adameps"], &[]),
    names("optimizer.beta1", &["beta1adam", "adambeta1"], &["betas"]),
    names("optimizer.beta2", &["adambeta2"], &["alpha", "rho"]),
    names("optimizer.ema", &["emadecay"], &["averagedecay"]),
    names("lr_schedule.warmup", &["warmupsteps", "warmupiters", "numwarmupsteps", "lrwarmupsteps"], &["lrwarmup"]),
    names("lr_schedule.lr_by_batch", &["lrbybatchsize", "learningratesbybatchsize"], &[]),
    names("lr_schedule.kind", &["lrscheduler", "lrschedulertype", "scheduler", "schedulertype", "lrdecaystyle"], &[]),
    names("lr_schedule.min_ratio", &["minlrratio"], &["minlr", "finallr"]),
    names("parallel.schedule", &["pipelineschedule", "ppschedule"], &[]),
    names("parallel.zero", &["zerostage"], &["stage", "zerooptimization"]),
    names("parallel.recompute", &["gradientcheckpointing", "activationcheckpointing", "checkpointactivations"], &[]),
    names("parallel.tensor", &["tensorparalleldegree", "tensorparallelsize", "tensormodelparallelsize", "tpsize", "tp"], &[]),
    names("parallel.pipeline", &["pipelineparalleldegree", "pipelineparallelsize", "pipelinemodelparallelsize", "ppsize", "pp"], &[]),
    names("parallel.sequence", &["sequenceparallel"], &[]),
    names("precision.dtype", &["compute"], &["amp", "mixedprecision", "bf16", "fp16", "precision"]),
    names("checkpoint.every", &["savesteps", "saveinterval", "saveevery", "checkpointinterval", "checkpointevery"], &[]),
    names("eval.every", &["evalsteps", "evalinterval", "evalevery", "valcheckinterval"], &[]),
];

/// Names that have a meaning in one section only: section, name, key.
const IN_SECTIONS: [(&str, &str, &str); 9] = [
    ("optimizer", "type", "optimizer.kind"),
    ("optimizer", "name", "optimizer.kind"),
    ("model", "type", "model.kind"),
    ("model", "name", "model.kind"),
    ("lr_schedule", "type", "lr_schedule.kind"),
    ("lr_schedule", "name", "lr_schedule.kind"),
    ("lr_schedule", "shape", "lr_schedule.kind"),
    ("batch", "size", "batch.global"),
    ("loss", "name", "loss.kind"),
];

/// The name in [`IN_SECTIONS`] whose meaning differs.
const SIMILAR_IN_SECTION: (&str, &str) = ("batch", "size");

/// Former names of sections.
const SECTIONS: [(&str, &str); 2] = [("schedule", "lr_schedule"), ("servers", "parameter_server")];

/// Former names of keys, in sections by their present names.
const FORMER: [(&str, &str); 22] = [
    ("run.audit_every", "run.sdc_check_every"),
    ("data.stage", "data.local_cache"),
    ("data.axes", "data.image_layout"),
    ("optimizer.offload", "offload.optimizer"),
    ("parallel.lanes", "parallel.virtual_ranks"),
    ("parallel.tensor_lanes", "parallel.virtual_tensor_ranks"),
    ("parallel.logit_rows", "parallel.loss_chunk_tokens"),
    ("parallel.average_every", "local_sgd.sync_every"),
    ("parallel.average_replicas", "local_sgd.replicas"),
    ("parallel.outer_lr", "local_sgd.outer_lr"),
    ("parallel.outer_momentum", "local_sgd.outer_momentum"),
    ("parallel.offload_shards", "offload.params"),
    ("parallel.offload_activations", "offload.activations"),
    ("parameter_server.wire", "parameter_server.message_dtype"),
    ("parameter_server.lease", "parameter_server.batches_per_lease"),
    ("device.memory_fraction", "device.memory"),
    ("checkpoint.asynchronous", "checkpoint.async_save"),
    ("checkpoint.when_busy", "checkpoint.if_busy"),
    ("checkpoint.tolerate", "checkpoint.io_retry_seconds"),
    ("comm.path", "comm.transport"),
    ("comm.reproducible", "comm.deterministic"),
    ("log.sample", "log.sample_tokens"),
];

/// Former names of values: key, name, present name. Values read them themselves.
const VALUES: [(&str, &str, &str); 4] = [
    ("comm.algorithm", "mpi", "vendor"),
    ("comm.algorithm", "tree", "halving-doubling"),
    ("comm.transport", "direct", "cuda-aware"),
    ("comm.transport", "staged", "host-staged"),
];

/// Returns a name in the form that [`Names`] has: in lower case, without `_` and `-`.
fn plain(name: &str) -> String {
    name.to_lowercase().replace(['_', '-'], "")
}

/// Replaces names of keys that mean the same as a key of ours by that key. Returns each name that
/// was found, such as `parallel.zero_stage`, with the key that it was read as.
///
/// # Errors
/// Returns an error if a key is given twice, by different names.
pub(super) fn rename(layer: &mut Table) -> Result<BTreeMap<String, String>> {
    let mut renamed = BTreeMap::new();
    for (former, section) in SECTIONS {
        if let Some(table) = layer.remove(former) {
            if layer.contains_key(section) {
                return Err(twice(former, section));
            }
            layer.insert(section.into(), table);
            renamed.insert(former.to_owned(), section.to_owned());
        }
    }
    let sections: Vec<String> = layer.keys().cloned().collect();
    for section in sections {
        let Some(Value::Table(table)) = layer.get(&section) else { continue };
        let keys: Vec<String> = table.keys().cloned().collect();
        for key in keys {
            let Some(ours) = same(&section, &key) else { continue };
            let Some(Value::Table(table)) = layer.get_mut(&section) else { continue };
            let Some(value) = table.remove(&key) else { continue };
            let (to, name) = ours.split_once('.').unwrap_or((ours, ""));
            let to = layer.entry(to).or_insert_with(|| Table::new().into());
            let Value::Table(to) = to else { continue };
            let alias = format!("{section}.{key}");
            if to.insert(name.into(), converted(ours, value)).is_some() {
                return Err(twice(&alias, ours));
            }
            renamed.insert(alias, ours.to_owned());
        }
        if layer.get(&section).is_some_and(|table| table.as_table().is_some_and(Table::is_empty)) {
            layer.remove(&section);
        }
    }
    Ok(renamed)
}

fn twice(alias: &str, ours: &str) -> Error {
    Error::input(format!("{alias} and {ours} are the same key, and both are given"))
        .hint(format!("keep {ours}"))
}

/// Converts the value of a key that was given by another name.
pub(super) fn converted(ours: &str, value: Value) -> Value {
    match (ours, value.as_str()) {
        ("device.matmul_autotune", Some("timed")) => true.into(),
        ("device.matmul_autotune", Some("heuristic")) => false.into(),
        _ => value,
    }
}

/// Returns the key that means exactly the same as a key of another name in this section.
pub(super) fn same(section: &str, key: &str) -> Option<&'static str> {
    let dotted = format!("{section}.{key}");
    if dotted == "device.matmul" {
        return Some("device.matmul_autotune");
    }
    if let Some((_, ours)) = FORMER.iter().find(|(former, _)| *former == dotted) {
        return Some(ours);
    }
    let name = plain(key);
    let in_section = IN_SECTIONS.iter().find(|(its, alias, _)| *its == section && *alias == name);
    if let Some((section, alias, ours)) = in_section {
        return ((*section, *alias) != SIMILAR_IN_SECTION).then_some(ours);
    }
    let ours = KEYS.iter().find(|names| names.exact.contains(&&name[..]))?.key;
    ours.split_once('.').is_some_and(|(its, own)| its == section && own != key).then_some(ours)
}

/// Returns whether a key of a section is another name of a key of ours.
pub(super) fn is_alias(section: &str, key: &str) -> bool {
    same(section, key).is_some()
}

/// Returns the present name of a section that is given by its former one.
pub(super) fn former_section(section: &str) -> Option<&'static str> {
    SECTIONS.iter().find(|(former, _)| *former == section).map(|(_, ours)| *ours)
}

/// Returns the present name of a section, which may be given by its former one.
pub(super) fn section_of_alias(section: &str) -> &str {
    former_section(section).unwrap_or(section)
}

/// Returns the former name of a value of a key, and its present one.
pub(super) fn former_value(key: &str, value: &str) -> Option<(&'static str, &'static str)> {
    let found = VALUES.iter().find(|(its, former, _)| *its == key && *former == value)?;
    Some((found.1, found.2))
}

/// Returns the key that another program's key means here; `section` is the section that it is in,
/// if known.
pub(super) fn meant(section: Option<&str>, key: &str) -> Option<&'static str> {
    let name = plain(key);
    if let Some((.., ours)) =
        IN_SECTIONS.iter().find(|(its, alias, _)| section == Some(its) && *alias == name)
    {
        return Some(ours);
    }
    let is_known =
        |names: &&Names| names.exact.contains(&&name[..]) || names.similar.contains(&&name[..]);
    KEYS.iter().find(is_known).map(|names| names.key).or_else(|| only_key_named(&name))
}

/// Returns our key with this name if only one section has it, for keys in unknown sections such as
/// `train.lr` and `training.weight_decay`.
fn only_key_named(name: &str) -> Option<&'static str> {
    let mut same = KEYS
        .iter()
        .map(|names| names.key)
        .filter(|key| key.split_once('.').is_some_and(|(_, own)| plain(own) == name));
    same.next().filter(|_| same.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Sources, load};

    #[test]
    fn every_key_exists_and_no_name_means_two() {
        let table = Table::try_from(full()).unwrap();
        let former = FORMER.iter().map(|(_, ours)| *ours);
        let ours = KEYS.iter().map(|names| names.key).chain(IN_SECTIONS.map(|(.., ours)| ours));
        for key in ours.chain(former) {
            let (section, name) = key.split_once('.').unwrap();
            assert!(table[section].as_table().unwrap().contains_key(name), "{key}");
        }
        let all = |names: &Names| [names.exact, names.similar].concat();
        let mut names: Vec<&str> = KEYS.iter().flat_map(all).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }

    /// Returns a configuration in which every key has a value.
    fn full() -> Config {
        let mut config = Config::default();
        config.run.name = Some("x".into());
        let model = &mut config.model;
        (model.kv_heads, model.hidden, model.vocabulary) = (Some(1), Some(1), Some(1));
        (model.norm_epsilon, model.tied) = (Some(1.0), Some(true));
        config.data.local_cache = Some("/tmp".into());
        config.batch.micro = Some(1);
        config.parallel.virtual_ranks = Some(1);
        config.parallel.virtual_tensor_ranks = Some(1);
        config.parallel.loss_chunk_tokens = Some(1);
        config.local_sgd.replicas = Some(1);
        config.lr_schedule.lr_by_batch = Some([(16, 0.1)].into_iter().collect());
        config
    }

    fn set(overrides: &[&str]) -> Result<Config> {
        let overrides: Vec<String> = overrides.iter().map(|item| (*item).to_owned()).collect();
        load(&Sources { overrides: &overrides, ..Sources::default() }).map(|(config, _)| config)
    }

    #[test]
    fn names_of_the_same_are_read() {
        for (given, canonical) in [
            ("parallel.lanes=8", "parallel.virtual_ranks=8"),
            ("parallel.tensor_lanes=2", "parallel.virtual_tensor_ranks=2"),
            ("parallel.average_every=epoch", "local_sgd.sync_every=epoch"),
            ("optimizer.offload=true", "offload.optimizer=true"),
            ("schedule.shape=constant", "lr_schedule.kind=constant"),
            ("lr_schedule.warmup_steps=3", "lr_schedule.warmup=3"),
            ("servers.lease=7", "parameter_server.batches_per_lease=7"),
            ("device.matmul=timed", "device.matmul_autotune=true"),
            ("comm.algorithm=tree", "comm.algorithm=halving-doubling"),
            ("comm.path=staged", "comm.transport=host-staged"),
            ("precision.compute=bf16", "precision.dtype=bf16"),
            ("parallel.zero_stage=2", "parallel.zero=2"),
            ("parallel.tensor_parallel_degree=2", "parallel.tensor=2"),
            ("parallel.activation_checkpointing=true", "parallel.recompute=true"),
            ("model.n_layers=6", "model.layers=6"),
            ("model.seq_len=32", "model.context=32"),
            ("model.vocab_size=100", "model.vocabulary=100"),
            ("batch.global_batch_size=8", "batch.global=8"),
            ("batch.per_replica=8", "batch.per_rank=8"),
            ("run.epoch_steps=8", "run.steps_per_epoch=8"),
            ("schedule.lr_by_batch={ 5 = 0.1 }", "lr_schedule.lr_by_batch={ 5 = 0.1 }"),
            ("optimizer.learning-rate=0.5", "optimizer.lr=0.5"),
        ] {
            let mut read = set(&[given]).unwrap();
            let aliases = std::mem::take(&mut read.aliases);
            assert_eq!(read, set(&[canonical]).unwrap(), "{given}");
            // An alias of a value is not an alias of a key.
            assert_eq!(aliases.is_empty(), given.starts_with("comm.algorithm"), "{given}");
        }
        for (key, former, ours) in VALUES {
            let [read, present] = [former, ours].map(|value| set(&[&format!("{key}={value}")]));
            assert_eq!(read.unwrap(), present.unwrap(), "{key}={former}");
        }
        let error = set(&["batch.batch_size=8"]).unwrap_err().to_string();
        assert!(error.contains("did you mean `batch.global`?"), "{error}");
        let mut both: Table = toml::from_str("[parallel]\nlanes = 2\nvirtual_ranks = 4").unwrap();
        let error = rename(&mut both).unwrap_err().to_string();
        assert!(
            error.contains("parallel.lanes and parallel.virtual_ranks are the same"),
            "{error}"
        );
    }

    #[test]
    fn other_names_are_known() {
        for (section, key, ours) in [
            (Some("optimizer"), "learning_rate", Some("optimizer.lr")),
            (Some("model"), "vocab", Some("model.vocabulary")),
            (Some("model"), "n_layer", Some("model.layers")),
            (Some("train"), "batch_size", Some("batch.global")),
            (Some("batch"), "per_device_train_batch_size", Some("batch.per_rank")),
            (Some("training"), "local_batch_size", Some("batch.per_rank")),
            (Some("fit"), "steps_per_epoch", Some("run.steps_per_epoch")),
            (None, "max-grad-norm", Some("optimizer.grad_clip")),
            (Some("train"), "weight_decay", Some("optimizer.weight_decay")),
            (Some("optimizer"), "type", Some("optimizer.kind")),
            (Some("train"), "type", None),
            (Some("train"), "every", None),
            (Some("train"), "epochs", Some("run.epochs")),
            (Some("training"), "num_train_epochs", Some("run.epochs")),
            (Some("model"), "wdth", None),
        ] {
            assert_eq!(meant(section, key), ours, "{section:?} {key}");
        }
    }
}
