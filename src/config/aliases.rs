//! Keys by the names that other programs give them, for errors that name the right one.

/// A key here, and its names in other programs: the last part of the name, in lower case, without
/// `_` and `-`.
const KEYS: [(&str, &[&str]); 37] = [
    ("run.steps", &["maxsteps", "maxiters", "numsteps", "totalsteps", "trainsteps", "iterations"]),
    ("run.epochs", &["numepochs", "maxepochs", "nepochs", "numtrainepochs"]),
    ("run.name", &["runname", "experiment", "expname", "jobname"]),
    ("run.root", &["outputdir", "outdir", "savedir", "logdir"]),
    ("run.seed", &["randomseed", "manualseed"]),
    (
        "model.layers",
        &["nlayer", "nlayers", "numlayers", "numhiddenlayers", "depth", "nblocks", "numblocks"],
    ),
    ("model.heads", &["nhead", "nheads", "numheads", "numattentionheads"]),
    ("model.kv_heads", &["nkvhead", "nkvheads", "numkvheads", "numkeyvalueheads"]),
    (
        "model.width",
        &[
            "nembd",
            "dmodel",
            "modeldim",
            "dim",
            "hiddensize",
            "hiddendim",
            "embeddim",
            "embeddingdim",
            "embedsize",
        ],
    ),
    ("model.hidden", &["intermediatesize", "ffndim", "dff", "ninner", "mlpdim", "ffnhiddensize"]),
    (
        "model.context",
        &[
            "blocksize",
            "seqlen",
            "seqlength",
            "sequencelength",
            "maxseqlen",
            "contextlength",
            "contextsize",
            "nctx",
            "npositions",
            "maxpositionembeddings",
            "maxlength",
        ],
    ),
    ("model.vocabulary", &["vocab", "vocabsize", "nvocab", "numtokens", "vocabularysize"]),
    ("model.dropout", &["dropoutrate", "pdropout", "residpdrop", "embdpdrop", "hiddendropoutprob"]),
    ("model.norm_epsilon", &["rmsnormeps", "layernormepsilon", "normeps"]),
    ("model.rope_scaling", &["ropeparameters"]),
    ("model.tied", &["tiewordembeddings", "tieembeddings"]),
    ("data.path", &["dataset", "datadir", "datapath", "datasetpath", "trainfile", "traindata"]),
    ("data.prefetch", &["numworkers", "prefetchfactor"]),
    (
        "batch.global",
        &["batchsize", "globalbatchsize", "trainbatchsize", "perdevicetrainbatchsize", "bs"],
    ),
    (
        "batch.micro",
        &[
            "microbatch",
            "microbatchsize",
            "gradientaccumulationsteps",
            "gradaccumsteps",
            "gradaccum",
            "accumulategradbatches",
            "devicebatchsize",
        ],
    ),
    ("optimizer.lr", &["learningrate", "baselr", "maxlr", "peaklr"]),
    ("optimizer.kind", &["optim", "optimizername", "optimizertype"]),
    ("optimizer.weight_decay", &["wd", "decay", "l2"]),
    (
        "optimizer.grad_clip",
        &[
            "maxgradnorm",
            "gradientclipval",
            "gradnormclip",
            "gradclipnorm",
            "clipgrad",
            "clipnorm",
            "clip",
            "gradientclipping",
        ],
    ),
    ("optimizer.eps", &["epsilon", "adamepsilon", "adameps"]),
    ("optimizer.beta1", &["beta1adam", "adambeta1", "betas"]),
    ("optimizer.beta2", &["adambeta2", "alpha", "rho"]),
    ("optimizer.ema", &["emadecay", "averagedecay"]),
    ("schedule.warmup", &["warmupsteps", "warmupiters", "numwarmupsteps", "lrwarmup"]),
    (
        "schedule.shape",
        &["lrscheduler", "lrschedulertype", "scheduler", "schedulertype", "lrdecaystyle"],
    ),
    ("schedule.min_ratio", &["minlrratio", "minlr", "finallr"]),
    ("parallel.schedule", &["pipelineschedule", "ppschedule"]),
    ("parallel.zero", &["zerostage", "stage", "zerooptimization"]),
    (
        "parallel.recompute",
        &["gradientcheckpointing", "activationcheckpointing", "checkpointactivations"],
    ),
    ("precision.compute", &["dtype", "amp", "mixedprecision", "bf16", "fp16", "precision"]),
    (
        "checkpoint.every",
        &["savesteps", "saveinterval", "saveevery", "checkpointinterval", "checkpointevery"],
    ),
    ("eval.every", &["evalsteps", "evalinterval", "evalevery", "valcheckinterval"]),
];

/// Keys whose meaning depends on the section: section, name in other programs, key here.
const IN_SECTIONS: [(&str, &str, &str); 9] = [
    ("optimizer", "type", "optimizer.kind"),
    ("optimizer", "name", "optimizer.kind"),
    ("model", "type", "model.kind"),
    ("model", "name", "model.kind"),
    ("schedule", "type", "schedule.shape"),
    ("schedule", "name", "schedule.shape"),
    ("schedule", "kind", "schedule.shape"),
    ("batch", "size", "batch.global"),
    ("loss", "name", "loss.kind"),
];

/// The key that another program's key means here; `section` is where it stands, if that is known.
pub(super) fn meant(section: Option<&str>, key: &str) -> Option<&'static str> {
    let plain = |name: &str| name.to_lowercase().replace(['_', '-'], "");
    if let Some((.., ours)) =
        IN_SECTIONS.iter().find(|(of, name, _)| section == Some(of) && *name == plain(key))
    {
        return Some(ours);
    }
    let known = KEYS.iter().find(|(_, names)| names.contains(&&plain(key)[..]));
    let by_name = || {
        // A key of ours in a section that is not: `train.lr`, `training.weight_decay`.
        let mut same = KEYS.iter().filter(|(ours, _)| {
            ours.split_once('.').is_some_and(|(_, name)| plain(name) == plain(key))
        });
        same.next().filter(|_| same.next().is_none())
    };
    known.or_else(by_name).map(|(ours, _)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn every_key_exists_and_no_name_means_two() {
        let table = toml::Table::try_from(full()).unwrap();
        let ours =
            KEYS.iter().map(|(ours, _)| ours).chain(IN_SECTIONS.iter().map(|(.., ours)| ours));
        for key in ours {
            let (section, name) = key.split_once('.').unwrap();
            assert!(table[section].as_table().unwrap().contains_key(name), "{key}");
        }
        let mut names: Vec<&str> =
            KEYS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }

    /// A configuration that writes every key down.
    fn full() -> Config {
        let mut config = Config::default();
        config.run.name = Some("x".into());
        let model = &mut config.model;
        (model.kv_heads, model.hidden, model.vocabulary) = (Some(1), Some(1), Some(1));
        (model.norm_epsilon, model.tied) = (Some(1.0), Some(true));
        config.batch.micro = Some(1);
        config
    }

    #[test]
    fn other_names_are_known() {
        for (section, key, ours) in [
            (Some("optimizer"), "learning_rate", Some("optimizer.lr")),
            (Some("model"), "vocab", Some("model.vocabulary")),
            (Some("model"), "n_layer", Some("model.layers")),
            (Some("train"), "batch_size", Some("batch.global")),
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
