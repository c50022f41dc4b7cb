//! The configuration file: one typed tree, every key with its default.
//!
//! Optional keys are resolved by [`super::resolve`]; nothing else sees them unresolved.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{
    CopyInterval, DEFAULT_FRACTION, DeviceChoice, DeviceMemory, Interval, LrByBatch, OrAuto,
    Partition, Size, Staleness, Time, WorkShares,
};
use hpctrain_base::pattern::Pattern;
use hpctrain_comm::{AlgorithmChoice, TransportChoice};
use hpctrain_data::{Augment, Axes, ExternalFiles, InputScale, Mix, Verify};
use hpctrain_nn::layers::Layer;
use hpctrain_nn::loss::CustomLoss;
use hpctrain_nn::optim::{Group, LrDecay};
use hpctrain_nn::{CustomModel, Input};
use hpctrain_parallel::{PipelineSchedule, Storage, TableSharding, Zero};

/// A key as its section declares it.
pub struct Key {
    /// The name in the section.
    pub name: &'static str,
    /// The lines of the explanation.
    pub text: &'static [&'static str],
    /// The type in Rust.
    pub rust_type: &'static str,
    /// The serde attribute; empty if there is none.
    attribute: &'static str,
}

impl Key {
    /// Returns true if the key may be in a configuration file.
    pub fn is_in_files(&self) -> bool {
        self.attribute != "serde(skip)"
    }
}

/// Defines sections: each key has its explanation, an optional attribute in brackets, its type and
/// its default.
macro_rules! sections {
    ($(
        $(#[doc = $doc:literal])* $name:ident {
            $($(#[doc = $text:literal])* $([$attribute:meta])? $field:ident: $type:ty = $default:expr,)*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[doc = $text])* $(#[$attribute])? pub $field: $type,)*
        }

        impl $name {
            /// The keys of the section, in order.
            pub const KEYS: &'static [Key] = &[
                $(Key {
                    name: stringify!($field),
                    text: &[$($text),*],
                    rust_type: stringify!($type),
                    attribute: stringify!($($attribute)?),
                },)*
            ];
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    )*};
}

/// A pattern that is known to be valid.
fn pattern(text: &str) -> Pattern {
    text.parse().expect("a valid glob pattern")
}

sections! {
    /// The whole file.
    Config {
        /// The run: its directory, device and length.
        run: Run = Run::default(),
        /// The model.
        model: Model = Model::default(),
        /// The loss function.
        loss: Loss = Loss::default(),
        /// The data.
        data: Data = Data::default(),
        /// Batch sizes.
        batch: Batch = Batch::default(),
        /// The optimizer.
        optimizer: Optimizer = Optimizer::default(),
        /// The learning-rate schedule.
        lr_schedule: LrSchedule = LrSchedule::default(),
        /// Parallelism: the layout of model and batch over ranks.
        parallel: Parallel = Parallel::default(),
        /// Local SGD and DiLoCo.
        local_sgd: LocalSgdConfig = LocalSgdConfig::default(),
        /// CPU offload: state of GPUs in host memory.
        offload: Offload = Offload::default(),
        /// Parameter servers.
        parameter_server: ParameterServer = ParameterServer::default(),
        /// Number formats.
        precision: Precision = Precision::default(),
        /// Settings of GPUs.
        device: Device = Device::default(),
        /// Checkpoints: how often they are saved, and which are kept.
        checkpoint: Checkpoint = Checkpoint::default(),
        /// In-memory checkpoints: copies of the state in the memory of the nodes.
        memory_checkpoint: MemoryCheckpoint = MemoryCheckpoint::default(),
        /// Elastic training: ranks that are lost, and ranks that join.
        elastic: Elastic = Elastic::default(),
        /// Evaluation.
        eval: Eval = Eval::default(),
        /// Communication between ranks.
        comm: Comm = Comm::default(),
        /// Logging: the log, progress lines and TensorBoard.
        log: Log = Log::default(),
        /// Other names by which keys were given, and the keys they were read as.
        [serde(skip)]
        aliases: BTreeMap<String, String> = BTreeMap::new(),
    }

    /// `[run]`
    Run {
        /// Name of the run's directory in `root`. Default: the name of the preset or file, with the
        /// next free number.
        name: Option<String> = None,
        /// Directory in which run directories are created.
        root: String = "runs".into(),
        /// Group, by name or number, whose members share the run: its directory may belong to
        /// another user if it belongs to this group. Default: a directory of another user is
        /// refused.
        group: Option<String> = None,
        /// Number of optimizer steps.
        steps: u64 = 1000,
        /// Number of passes over the training data, instead of `steps`: the run ends with the step
        /// in which the last sample of the last epoch is seen. 0 uses `steps`.
        epochs: u64 = 0,
        /// Number of steps of an epoch, wherever epochs are counted: `epochs`, `every_epochs`,
        /// hooks, metrics. Samples continue over the data from epoch to epoch. 0: an epoch is one
        /// pass over the training data.
        steps_per_epoch: u64 = 0,
        /// Seed of all random streams: initial weights, sample order, dropout.
        seed: u64 = 1337,
        /// Device that ranks compute on: `cpu`, `cuda` (the GPUs of the node, one per rank),
        /// `cuda:0,2` (only these GPUs of the node), `auto` (GPUs if there are any, else the
        /// CPU), or `mixed` (GPUs for as many ranks of a node as it has GPUs, the CPU for the
        /// others, in one data-parallel job).
        device: DeviceChoice = DeviceChoice::Auto,
        /// Compute threads per rank. Default: the cores that the rank may use, divided among the
        /// ranks that share them, at most the CPU quota of its control group (cgroup).
        threads: Option<usize> = None,
        /// Number of consecutive steps with a non-finite loss or gradient, whose updates are
        /// skipped, after which the run fails.
        max_skipped: u64 = 10,
        /// Steps between checks for silent data corruption (SDC): replicas compare checksums of
        /// parameters and optimizer state, and each update verifies that they have not changed
        /// since the update before it. 0 disables the checks.
        sdc_check_every: u64 = 0,
        /// Most memory that a rank may need, such as `8GiB`: a run that would need more is refused
        /// before it starts. Default: only the memory of the node is the limit.
        memory_limit: Option<Size> = None,
        /// Time limit of the job, such as `3h 50m`: the run saves a checkpoint before the limit and
        /// exits with code 75. Default: the end time that Slurm has set, if any. `0s` disables the
        /// limit.
        time_limit: Option<Time> = None,
    }

    /// `[model]`
    Model {
        /// Kind of model: gpt, llama, or layers (a list of layers).
        kind: ModelKind = ModelKind::Gpt,
        /// Number of transformer blocks; for kind `layers`, the list of layers: `[[model.layers]]`.
        layers: LayerList = LayerList::Count(4),
        /// Layers: shape of a sample, such as `[28, 28, 1]`; images have their channels last.
        input: Option<Vec<usize>> = None,
        /// Number of attention heads per block.
        heads: usize = 4,
        /// Llama: number of key and value heads, each shared by a group of query heads
        /// (grouped-query attention). Default: `heads`.
        kv_heads: Option<usize> = None,
        /// Width of the residual stream (embedding dimension).
        width: usize = 128,
        /// Llama: width of the feed-forward layers. Default: 8/3 of `width`, rounded up to a
        /// multiple of 64.
        hidden: Option<usize> = None,
        /// Context length: tokens per sequence.
        context: usize = 64,
        /// Vocabulary size: number of token ids. Default: that of the data.
        vocabulary: Option<usize> = None,
        /// GPT: whether linear layers and norms have biases. Default: true.
        bias: Option<bool> = None,
        /// Llama: whether the LM head is tied to the token embedding. Default: false.
        tied: Option<bool> = None,
        /// Llama: base of the rotary position embedding (RoPE). Default: 10000.
        rope_theta: Option<f64> = None,
        /// `[model.rope_scaling]`, for Llamas: scaling of RoPE frequencies, for contexts longer
        /// than those of pre-training.
        rope_scaling: RopeScaling = RopeScaling::default(),
        /// Llama: epsilon of RMSNorm, which is added to the mean square. Default: 1e-5.
        norm_epsilon: Option<f64> = None,
        /// Dropout probability.
        dropout: f32 = 0.0,
        /// Name of a custom model, which only the program that defines it can build.
        own: Option<CustomModel> = None,
        /// `[model.place]`, for GPUs: embedding offload. With `tables = "host"` the embedding
        /// tables of the first layer, their gradients and their optimizer state are in host memory,
        /// and the host looks rows up and updates them; with `device` they are on the GPU.
        place: Place = Place::default(),
    }

    /// `[model.rope_scaling]`
    RopeScaling {
        /// Scaling: default (none), linear (all frequencies are divided by `factor`), or llama3, as
        /// in Llama 3.1 to 3.3 (low frequencies are divided by `factor`, high ones are kept, those
        /// in between are interpolated).
        rope_type: RopeType = RopeType::Default,
        /// Linear, llama3: the divisor, at least 1.
        factor: Option<f64> = None,
        /// Llama3: frequencies that turn at most this many times within the original context are
        /// divided by `factor`.
        low_freq_factor: Option<f64> = None,
        /// Llama3: frequencies that turn at least this many times within the original context are
        /// kept.
        high_freq_factor: Option<f64> = None,
        /// Llama3: the original context length, in tokens, of pre-training.
        original_max_position_embeddings: Option<usize> = None,
    }

    /// `[model.place]`
    Place {
        /// Memory that holds the embedding tables of the first layer: device or host.
        tables: EmbeddingPlacement = EmbeddingPlacement::Device,
    }

    /// `[loss]`
    Loss {
        /// Loss function: cross-entropy (of classes), mse, mae, huber, binary-cross-entropy (of
        /// logits), or contrastive (of embeddings with classes: supervised contrastive loss over the
        /// whole global batch).
        kind: LossKind = LossKind::CrossEntropy,
        /// Cross-entropy: fraction of the target that is spread evenly over all classes.
        /// Evaluations do not use it.
        label_smoothing: f32 = 0.0,
        /// Cross-entropy: a weight for each class; empty means 1 for all. Evaluations do not use
        /// them.
        class_weights: Vec<f32> = vec![],
        /// Huber: the absolute error up to which the loss is quadratic; it is linear beyond.
        huber_delta: f32 = 1.0,
        /// Contrastive: divisor of the similarities of embeddings.
        temperature: f32 = 0.1,
        /// Name of a custom loss, which only the program that defines it can compute.
        own: Option<CustomLoss> = None,
    }

    /// `[data]`
    Data {
        /// A directory of shards, one file, or `bundled:tiny-shakespeare`.
        path: String = "bundled:tiny-shakespeare".into(),
        /// File names of the training shards: `*` matches any characters, `[02-4]` one of those in
        /// brackets.
        train: Pattern = pattern("train-*.h5"),
        /// File names of the validation shards. If this is not the default, there must be such
        /// files, unless `val_fraction` is set.
        validation: Pattern = pattern("val-*.h5"),
        /// Fraction of the samples held out for validation if there are no validation shards: of
        /// rows, some from everywhere; of text, the end. 0 trains without validation data.
        val_fraction: f64 = 0.0,
        /// Name of the HDF5 dataset that holds the stream of tokens.
        tokens: String = "/tokens".into(),
        /// Name of the HDF5 dataset that holds one sample per row.
        inputs: String = "/inputs".into(),
        /// Name of the HDF5 dataset that holds an id of each category per row, for models with
        /// embedding tables.
        categories: String = "/categories".into(),
        /// Name of the HDF5 dataset that holds one target per row.
        targets: String = "/targets".into(),
        /// Name of the HDF5 dataset that holds one loss weight per row, used for training. Default:
        /// `/weights`, in shards that have it; an empty name means no weights.
        weights: Option<String> = None,
        /// Layout of images in files: nhwc (height × width × channels), or nchw, which is
        /// transposed to nhwc when it is read.
        image_layout: Axes = Axes::Nhwc,
        /// Scaling of inputs: unit (unsigned bytes divided by 255) or none, instead of the
        /// attributes `mean` and `std` of the dataset. Default: these attributes, if there are any.
        scale: Option<InputScale> = None,
        /// Visit samples in a random order, a new one every epoch.
        shuffle: bool = true,
        /// Order of training samples: samples (each rank draws from all shards, and the order is the
        /// same on any number of ranks), or files (shards are dealt to the data-parallel ranks,
        /// each of which reads only its own, so that the order depends on the number of ranks).
        order: DataOrder = DataOrder::Samples,
        /// Text file of training samples that are not read: a number in each line, as
        /// `hpctrain data which --numbers` prints it. Their positions draw other samples; all other
        /// positions keep theirs.
        exclude: Option<String> = None,
        /// Let a batch take a sample again if the data has fewer samples than `batch.global`;
        /// false refuses such data.
        repeat: bool = false,
        /// Number of micro-batches that are read ahead.
        prefetch: usize = 4,
        /// Which blocks of shards are compared with their checksums as they are read: off,
        /// first-pass (each when a rank first reads from it), or always.
        verify: Verify = Verify::FirstPass,
        /// External raw files of HDF5 outside the directory of the file that names them: refuse, or
        /// allow where the data is trusted.
        external_files: ExternalFiles = ExternalFiles::Refuse,
        /// Directory on a node-local disk, such as `/tmp`, to which one rank of each node copies
        /// the shards before training; intact copies are reused. Default: shards are read where
        /// they are.
        local_cache: Option<String> = None,
        /// `[data.augment]`, for training images: `flip` (true mirrors half of them, left to
        /// right), `shift` (moves by up to this many pixels, the border repeated), `crop` (pads
        /// with this many zeros on every side and crops to the original size).
        augment: Augment = Augment::default(),
        /// `[[data.mix]]`: several datasets instead of `path`, each with a `path` and a `weight`.
        mix: Vec<Mix> = vec![],
    }

    /// `[batch]`
    Batch {
        /// Global batch size: samples per step over all ranks, however many there are.
        global: u64 = 16,
        /// Samples per step of each data-parallel rank, instead of `global`, which becomes
        /// `per_rank` × replicas × shards at the first start of the run. 0 uses `global`.
        per_rank: u64 = 0,
        /// `per_rank`, once it was resolved to `global`; else 0.
        [serde(skip)]
        of_rank: u64 = 0,
        /// Micro-batch size: samples computed at once. Default: the most that divide the samples of
        /// a virtual rank, have at most 4096 tokens, and keep pipeline stages busy.
        micro: Option<u64> = None,
        /// Parameter servers, with workers that do not wait for each other: samples per batch of a
        /// worker. Default: `global` divided by the number of workers, rounded.
        worker: Option<u64> = None,
    }

    /// `[optimizer]`
    Optimizer {
        /// Optimizer: adamw, adam, sgd, adagrad, rmsprop, lamb, lars, lion.
        kind: OptimizerKind = OptimizerKind::Adamw,
        /// Peak learning rate.
        lr: f64 = 1e-3,
        /// AdamW, Adam, LAMB: decay of the first moment. Lion: weight of the moment in a step.
        beta1: f32 = 0.9,
        /// AdamW, Adam, LAMB: decay of the second moment. RMSProp: decay of the mean square. Lion:
        /// decay of the moment.
        beta2: f32 = 0.99,
        /// AdamW, Adam, LAMB, Adagrad, RMSProp: added to the denominator for numerical stability.
        eps: f32 = 1e-8,
        /// SGD, LARS, RMSProp: decay of the momentum buffer.
        momentum: f32 = 0.9,
        /// SGD, LARS: use Nesterov momentum.
        nesterov: bool = false,
        /// LARS: trust coefficient: the norm of a matrix's step at a learning rate of 1, as a
        /// fraction of the norm of the matrix.
        trust: f32 = 0.001,
        /// Weight decay of matrices and embedding tables.
        weight_decay: f32 = 0.1,
        /// Maximum global norm of the gradient; 0 disables clipping.
        grad_clip: f64 = 1.0,
        /// Decay of an exponential moving average (EMA) of the parameters, which evaluations,
        /// predictions and exports use instead of them; 0 disables it.
        ema: f32 = 0.0,
        /// Updates of the embedding tables of the first layer: `dense`, of all rows; `sparse`, of
        /// the rows that a batch contains, whose optimizer state is not changed in other steps
        /// either; or `auto`: sparse for `embedding_tables` if that gives the results of dense
        /// updates (Adagrad, or SGD without momentum, without weight decay). Sparse tables are in
        /// host memory.
        tables: TableUpdates = TableUpdates::Auto,
        /// `[[optimizer.groups]]`: parameters with a learning rate or weight decay that differs
        /// from the rest, as `names`, `lr_factor` and `weight_decay`; the first group that matches
        /// the name of a parameter applies.
        groups: Vec<Group> = vec![],
    }

    /// `[lr_schedule]`
    LrSchedule {
        /// Decay after the warm-up: constant, linear, cosine, or wsd (constant, then a linear decay
        /// in the last steps).
        kind: LrDecay = LrDecay::Cosine,
        /// Steps of linear warm-up.
        warmup: u64 = 100,
        /// Final learning rate, as a fraction of the peak.
        min_ratio: f64 = 0.1,
        /// Steps of the final decay, for `wsd`. Default: a tenth of the run.
        decay: Option<u64> = None,
        /// Global batch that `optimizer.lr` was tuned for: if set, the rate is scaled to
        /// `batch.global`.
        reference_batch: Option<u64> = None,
        /// Rule by which the rate is scaled: linear, or sqrt (with the square root of the batch).
        scaling: Scaling = Scaling::Linear,
        /// Peak learning rates by global batch, instead of `optimizer.lr`, such as
        /// `{ 256 = 0.1, 512 = 0.15 }`: `batch.global` must be one of them.
        lr_by_batch: Option<LrByBatch> = None,
    }

    /// `[parallel]`
    Parallel {
        /// Choice of the layout: `given` (the keys of this section), or `auto` (the fastest that
        /// fits in memory, as found by `hpctrain plan`; keys that are given in this section stay
        /// fixed).
        layout: LayoutMode = LayoutMode::Given,
        /// Keys of the layout that a file or `--set` gives, such as `parallel.zero`.
        [serde(skip)]
        given: BTreeSet<String> = BTreeSet::new(),
        /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too
        /// (FSDP).
        zero: Zero = Zero::Zero,
        /// Rows of embedding tables with sparse updates that a rank holds, with their optimizer
        /// state: `replicated`, all of them; `row-wise`, an equal part of all rows; `table-wise`,
        /// whole tables; `auto` is replicated at ZeRO stage 0, else row-wise.
        tables: TableShardingChoice = TableShardingChoice::Auto,
        /// Where parameters are updated and their optimizer state is kept: `ranks`, on all of them
        /// as `zero` says, or `central`, on `owners` ranks, to which the others send their
        /// gradients and from which they receive the new parameters: after each update, or with
        /// `zero = 3` before each use.
        storage: Storage = Storage::Ranks,
        /// Central storage: number of ranks that hold it, each an equal part.
        owners: usize = 1,
        /// Number of ranks that one copy of the parameters is sharded over. Default: 1 at ZeRO
        /// stage 0, else all remaining ranks.
        shard: Option<usize> = None,
        /// Number of copies of the parameters (replicas). Default: as many as the remaining ranks
        /// allow.
        replica: Option<usize> = None,
        /// Tensor parallelism: number of ranks that share the blocks of a GPT or a Llama; each has
        /// some heads, some columns of the hidden layers and some rows of the vocabulary.
        tensor: usize = 1,
        /// Virtual tensor-parallel ranks: the sums of each block are reduced in a fixed tree over
        /// them. Ranks that divide them into equal groups of a power of two give the same bits.
        /// Default: `tensor`.
        virtual_tensor_ranks: Option<usize> = None,
        /// Sequence parallelism: shard activations outside of GEMMs across the ranks of `tensor`,
        /// too.
        sequence: bool = false,
        /// Pipeline parallelism: number of stages of consecutive blocks, each on ranks of its own;
        /// micro-batches pass through them one after the other.
        pipeline: usize = 1,
        /// Number of blocks in every stage, such as [4, 5, 3]. Default: the partition with the
        /// least work in the busiest stage.
        stages: Option<Vec<usize>> = None,
        /// Pipeline schedule: `1f1b`, or `zero-bubble`, which defers the GEMMs of weight gradients
        /// to time that would be idle, at the cost of more memory for activations.
        schedule: PipelineSchedule = PipelineSchedule::OneForwardOneBackward,
        /// When gradients are reduced over shards: `step`, once at the end of a step, until which
        /// ranks add full gradients; `blocks`, at the same time, in the order of one rank where ranks
        /// have unequal numbers of virtual ranks or not a power of two of them (`auto` does this if
        /// `virtual_ranks` is set); `micro`, after each micro-batch, so that a rank has the full
        /// gradients of two blocks and parts of its shard, for as many reduce-scatters as
        /// micro-batches; or `auto`: micro with ZeRO 2 and 3 where it saves at least half of the
        /// gradients. `micro` requires one micro-batch per virtual rank, and powers of two of
        /// shards and of micro-batches per rank. With the same `virtual_ranks` it changes no bits,
        /// unless `comm.dtype` is bf16.
        reduce: ReduceChoice = ReduceChoice::Auto,
        /// Virtual data-parallel ranks: gradients are reduced in a fixed tree over them. Any number
        /// of ranks up to this one gives the same bits; they need not have equal numbers of virtual
        /// ranks. Default: the data-parallel ranks, or the micro-batches of a step if gradients are
        /// reduced after each.
        virtual_ranks: Option<usize> = None,
        /// Work of ranks of unequal speed: shares of the virtual ranks, one for each data-parallel
        /// rank, such as [2, 1]; `auto`, in proportion to their speed, which is measured before the
        /// first step; or `equal`. Requires `virtual_ranks`, of which each rank should have several.
        work_shares: WorkShares = WorkShares::Equal,
        /// ZeRO 3: number of blocks whose parameters are all-gathered ahead of their turn. Each
        /// costs the memory of one block's parameters and hides an all-gather behind the blocks
        /// before; 0 all-gathers the parameters of a block when it needs them.
        prefetch: usize = 1,
        /// Activation checkpointing: keep only the input of each block and recompute its
        /// activations in the backward.
        recompute: bool = false,
        /// Chunked cross-entropy: language models compute the LM head and the loss in chunks of
        /// this many tokens. 0 takes all tokens of a micro-batch, or of `eval.batch`. Default: as
        /// many as have 1 GiB of logits (rounded down to a power of two), but 16,384 to 1,048,576; 0
        /// where the head or the layout does not support chunks.
        loss_chunk_tokens: Option<usize> = None,
    }

    /// `[local_sgd]`
    LocalSgdConfig {
        /// Steps between two averages of parameters and optimizer state over the replicas, which
        /// take local steps in between; `epoch` averages after each pass over the data. 0 disables
        /// local SGD: gradients are reduced in every step.
        sync_every: Interval = Interval::Steps(0),
        /// Total number of replicas. A rank trains several of them in turn if it must; ranks that
        /// divide them into equal groups of a power of two give the same bits. Default: the
        /// replicas of the mesh.
        replicas: Option<usize> = None,
        /// Learning rate of the outer step, on the change of the averaged parameters; 1 without
        /// momentum takes the average.
        outer_lr: f64 = 1.0,
        /// Nesterov momentum of the outer step (`DiLoCo`).
        outer_momentum: f32 = 0.0,
    }

    /// `[offload]`, for GPUs.
    Offload {
        /// Keep fp32 master weights and optimizer state in host memory, and update them there.
        optimizer: bool = false,
        /// Keep parameters and reduced gradients in host memory; the parameters of each block are
        /// copied to the GPU for its turn. Requires `parallel.zero = 3` and `optimizer`.
        params: bool = false,
        /// Keep the inputs of blocks in host memory; each is copied back before its block's
        /// backward. Requires `parallel.recompute`.
        activations: bool = false,
    }

    /// `[parameter_server]`, for runs with `--servers`.
    ParameterServer {
        /// Partition of each unit into ranges, each held by one server: `fixed:2` (2 ranges),
        /// `min:256KiB` (one range per server, but none smaller than this), or `max:64MiB` (as few
        /// ranges as possible, none larger than this).
        partition: Partition = Partition::Min(Size(256 << 10)),
        /// Maximum staleness: steps that a worker may be ahead of the slowest: 0 (synchronous, with
        /// the bits of data parallelism), a number of steps, or `none` (no limit).
        staleness: Staleness = Staleness::Bound(0),
        /// Number format of parameters and gradients in messages: f32 or bf16.
        message_dtype: MessageDtype = MessageDtype::F32,
        /// Connections from each worker to each server, among which ranges are distributed: for
        /// networks on which one connection is not fast enough.
        connections: usize = 1,
        /// Learning rate of a stale gradient: `none` does not change it, `inverse` divides it by
        /// one more than the updates in between.
        stale_lr: StaleRate = StaleRate::None,
        /// Number of batches that a worker leases from the coordinator at a time.
        batches_per_lease: u64 = 64,
        /// Number of workers that the run is planned for: a step has this many batches. Default:
        /// the workers that are there at the start.
        workers: Option<usize> = None,
        /// Host, port, or both at which others reach coordinator and servers, such as `10.0.0.7`,
        /// `[2001:db8::7]:2222`, `:2222` or `node7:2222`. They listen at an IP address given here,
        /// else at that of `comm.interface`, else at the one that the host's name stands for.
        /// Default: the host's name (or the interface's address) and any port.
        address: Option<String> = None,
        /// Seconds without a message after which a process is considered dead, and within which one
        /// that all need must come back.
        timeout: u64 = 60,
    }

    /// `[precision]`
    Precision {
        /// Number format of parameters, activations and GEMMs: f32, tf32 (f32 rounded for the
        /// tensor cores), bf16 (with f32 accumulation, master weights and optimizer state), or
        /// auto: bf16 on GPUs, f32 on CPUs. On CPUs that multiply bf16, only the operands of GEMMs
        /// have it.
        dtype: Compute = Compute::Auto,
    }

    /// `[device]`
    Device {
        /// Memory that ranks take of their GPU: a fraction of it for all ranks that share it, with
        /// NCCL's buffers, or a size for each rank such as `40GiB`, without them, allocated at the
        /// start; or `grow`: blocks allocated as they are needed, up to 0.9 of the GPU.
        memory: DeviceMemory = DeviceMemory::Fraction(DEFAULT_FRACTION),
        /// Most memory of a GPU that a rank takes, such as `16GiB`.
        memory_limit: Option<Size> = None,
        /// Number of ranks that may share one GPU, each with its part of the memory.
        ranks_per_gpu: usize = 1,
        /// Time the algorithms that cuBLASLt proposes for each GEMM before the first step, take the
        /// fastest, and keep the choice in `matmuls.json`; false takes the one it proposes first.
        matmul_autotune: bool = false,
    }

    /// `[checkpoint]`
    Checkpoint {
        /// Steps between checkpoints; 0 saves at the end only. `auto` takes the interval of Young
        /// and Daly, from the measured cost of a save and the failures of the run so far.
        every: OrAuto = OrAuto::Number(500),
        /// Epochs between checkpoints, instead of `every`: saved with the step in which the last
        /// sample of an epoch is seen. 0 uses `every`.
        every_epochs: u64 = 0,
        /// Seconds after which a checkpoint is saved although none is due by `every`; 0 saves by
        /// steps alone.
        every_seconds: u64 = 0,
        /// Number of newest checkpoints that are kept.
        keep: usize = 2,
        /// Checkpoints of steps that are multiples of this are kept for ever; 0 keeps none for its
        /// step.
        keep_every: u64 = 0,
        /// Number of checkpoints with the lowest validation losses that are kept in addition.
        keep_best: usize = 1,
        /// Write checkpoints while training continues: costs memory for a copy of the tensors that
        /// a rank saves.
        async_save: bool = true,
        /// Behaviour of a save while the one before is still being written: wait, or skip.
        if_busy: WhenBusy = WhenBusy::Wait,
        /// Seconds since the last good checkpoint for which a run continues and retries although
        /// files cannot be written; 0 ends the run at once.
        io_retry_seconds: u64 = 1800,
    }

    /// `[memory_checkpoint]`
    MemoryCheckpoint {
        /// Steps between in-memory checkpoints, from which `--resume auto` continues a job that was
        /// killed: 0 takes none, `auto` the smallest number for which they cost at most 1 % of the
        /// time.
        every: CopyInterval = CopyInterval::Steps(0),
        /// Number of newest in-memory checkpoints that are kept. While one is written there is one
        /// more.
        keep: usize = 1,
        /// Directory for them on each node, of a file system in memory.
        dir: String = "/dev/shm".into(),
        /// Directory on a local disk of each node to which some of them are written, too, so that
        /// they outlive a reboot. Default: none.
        disk_dir: Option<String> = None,
        /// Steps between those that are written to `disk_dir`.
        disk_every: u64 = 100,
    }

    /// `[elastic]`
    Elastic {
        /// Continue without ranks that are lost, with the same bits, and let processes join while
        /// the run trains. Ranks communicate over TCP; `memory_checkpoint.every` must be set.
        on: bool = false,
        /// The least number of ranks: with fewer the job ends with exit code 75.
        min_ranks: usize = 1,
        /// Seconds without an answer after which a rank counts as lost.
        timeout: u64 = 10,
        /// Start a process for a rank that was lost, and let other processes join.
        rejoin: bool = true,
    }

    /// `[eval]`
    Eval {
        /// Steps between evaluations; 0 evaluates at the end only.
        every: u64 = 250,
        /// Epochs between evaluations, instead of `every`: after the step in which the last sample
        /// of an epoch is seen. 0 uses `every`.
        every_epochs: u64 = 0,
        /// Number of validation samples. Default: all.
        samples: Option<u64> = None,
        /// Samples computed at once; the same on any number of ranks, so that the loss is.
        batch: u64 = 16,
        /// Evaluate in the trainer; false leaves it to evaluators, which run beside the trainer.
        inline: bool = true,
        /// Early stopping: number of consecutive evaluations without a lower loss after which
        /// training ends; 0 disables it.
        patience: u64 = 0,
        /// Early stopping: decrease that a loss must exceed to count as lower.
        min_delta: f64 = 0.0,
    }

    /// `[comm]`
    Comm {
        /// Algorithm of collectives: vendor (that of the MPI library or NCCL), ring,
        /// halving-doubling (Rabenseifner), hierarchical, reduce-to-one, or auto, which measures
        /// them at the start.
        algorithm: AlgorithmChoice = AlgorithmChoice::Auto,
        /// Let auto take only algorithms that add in the order of `halving-doubling`, so that the
        /// choice does not change the bits.
        deterministic: bool = true,
        /// Number format of the gradients that data-parallel ranks send each other to sum them: f32,
        /// or bf16, which halves the bytes. Terms in bf16 are added in f32, once inside each node
        /// and once between nodes with `hierarchical`, and rounded after each: the bits then depend
        /// on the layout. GPUs only, with nccl, cuda-ipc or cuda-aware.
        dtype: MessageDtype = MessageDtype::F32,
        /// Transport of GPU buffers: nccl (a GPU for every rank), cuda-ipc (ranks of one node
        /// write to each other's memory), cuda-aware (MPI gets device pointers), host-staged
        /// (through pinned host memory), or auto: the first of nccl, cuda-ipc and cuda-aware that
        /// passes a probe at the start, else host-staged.
        transport: TransportChoice = TransportChoice::Auto,
        /// Seconds that a rank may wait for the others before the job reports where each rank is
        /// and ends: more than the longest evaluation or checkpoint takes; 0 waits for ever. `auto`
        /// is 20 times the slowest step, evaluation or save so far, at least 120; and at least 600
        /// while those are not measured: at the start, at the end, and in other commands.
        timeout: OrAuto = OrAuto::Auto,
        /// Network interface at which the coordinator and the servers of a run listen: its name,
        /// such as `ib0`, or the network of its address, such as `10.1.0.0/16`. Default: the one
        /// that the host's name stands for. Ranks that MPI starts follow the settings of the MPI
        /// library.
        interface: Option<String> = None,
        /// Encrypt the connections of a run with servers between hosts. Both ends authenticate with
        /// the run's secret in any case.
        encrypt: bool = true,
    }

    /// `[log]`
    Log {
        /// Least severe messages that are logged: error, warn, info, debug, trace.
        level: Level = Level::Info,
        /// Steps between progress lines when the output is not a terminal.
        every: u64 = 50,
        /// A rank whose compute time per virtual rank is this many times that of the median rank of
        /// its pipeline stage, and 5 ms a step longer, is named as a straggler in the log of rank 0;
        /// 0 names none.
        straggler_factor: f64 = 1.5,
        /// Number of steps over which ranks are compared.
        straggler_window: u64 = 20,
        /// Log where the parameters, gradients, optimizer state and activations of each block are
        /// (CPU, GPU, or host memory beside a GPU), and their bytes; with servers, what each of them
        /// holds. On GPUs also which GPU each buffer, kernel and GEMM goes to, once for every kind.
        placement: bool = false,
        /// Number of tokens of text that the trained model generates at the end.
        sample_tokens: usize = 300,
        /// Write scalars for TensorBoard into `tensorboard/` of the run's directory.
        tensorboard: bool = false,
        /// With `tensorboard`: steps between two histograms of all weights and gradients; 0 writes
        /// none.
        histograms: u64 = 0,
    }
}

/// The time that a rank may wait for the others with `comm.timeout = "auto"` while nothing is
/// measured.
const UNMEASURED_TIMEOUT: Duration = Duration::from_secs(600);

impl Comm {
    /// Returns the time that a rank may wait for the others while nothing is measured; zero waits
    /// for ever.
    pub fn unmeasured_timeout(&self) -> Duration {
        self.timeout.number().map_or(UNMEASURED_TIMEOUT, Duration::from_secs)
    }
}

impl Data {
    /// Returns the location of the data for display.
    pub fn display_location(&self) -> String {
        let parts: Vec<String> =
            self.mix.iter().map(|one| format!("{} × {}", one.weight, one.path)).collect();
        if parts.is_empty() { self.path.clone() } else { parts.join(" + ") }
    }
}

impl Model {
    /// Returns the section of a custom model, with the keys that its data needs.
    pub fn from_custom(network: CustomModel) -> Self {
        let of_shape = |input: Vec<usize>| Self {
            kind: ModelKind::Layers,
            input: Some(input),
            ..Self::default()
        };
        let section = match network.input() {
            Some(Input::Text { context, vocabulary }) => {
                Self { context: *context, vocabulary: Some(*vocabulary), ..Self::default() }
            }
            Some(Input::Numbers(shape)) => of_shape(shape.clone()),
            Some(Input::Ids { count, .. }) => of_shape(vec![*count]),
            None => Self::default(),
        };
        Self { own: Some(network), ..section }
    }
}

impl Config {
    /// Returns true if sparse updates of embedding tables give the results of dense ones: rows whose
    /// gradient is zero stay as they are.
    pub fn sparse_updates_are_exact(&self) -> bool {
        let Optimizer { kind, momentum, weight_decay, groups, .. } = &self.optimizer;
        let keeps_rows = match kind {
            OptimizerKind::Adagrad => true,
            OptimizerKind::Sgd => *momentum == 0.0,
            _ => false,
        };
        let decays = |group: &Group| group.weight_decay.is_some_and(|decay| decay != 0.0);
        keeps_rows && *weight_decay == 0.0 && !groups.iter().any(decays)
    }

    /// Returns true if a key asks for something that only GPUs support.
    pub fn needs_gpu(&self) -> bool {
        let Offload { optimizer, params, activations } = self.offload;
        let offloads = optimizer || params || activations;
        self.precision.dtype.needs_gpu()
            || offloads
            || self.model.place.tables == EmbeddingPlacement::Host
    }
}

/// `parallel.layout`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayoutMode {
    /// The layout is given by the keys of `[parallel]`.
    Given,
    /// The planner chooses the fastest layout that fits in memory.
    Auto,
}

/// Kinds of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// GPT-2.
    Gpt,
    /// Llama.
    Llama,
    /// A list of layers, one after the other.
    Layers,
}

/// Scaling of the frequencies of rotary position embeddings (RoPE).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeType {
    /// No scaling.
    Default,
    /// All frequencies are divided by a factor.
    Linear,
    /// Low frequencies are divided by a factor, as in Llama 3.1.
    Llama3,
}

impl RopeType {
    /// Returns the name of the type, which is the same in Hugging Face's files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear => "linear",
            Self::Llama3 => "llama3",
        }
    }
}

/// The memory that holds embedding tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingPlacement {
    /// The memory of the device that computes.
    Device,
    /// Host memory; the host also looks rows up and updates them.
    Host,
}

/// `optimizer.tables`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableUpdates {
    /// Sparse where that gives the results of dense updates.
    Auto,
    /// All rows are updated in every step.
    Dense,
    /// The rows that a batch contains are updated.
    Sparse,
}

/// `parallel.tables`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TableShardingChoice {
    /// Replicated at ZeRO stage 0, else row-wise.
    Auto,
    /// Every rank holds all rows.
    Replicated,
    /// Every rank holds an equal part of all rows.
    RowWise,
    /// Every rank holds whole tables.
    TableWise,
}

impl TableShardingChoice {
    /// Returns what `auto` chooses at this ZeRO stage, or what is given.
    pub fn resolve(self, zero: Zero) -> TableSharding {
        match self {
            Self::Auto if zero == Zero::Zero => TableSharding::Replicated,
            Self::Auto | Self::RowWise => TableSharding::RowWise,
            Self::Replicated => TableSharding::Replicated,
            Self::TableWise => TableSharding::TableWise,
        }
    }
}

/// The number of transformer blocks, or a list of layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum LayerList {
    /// The number of transformer blocks.
    Count(usize),
    /// The layers of the list.
    List(Vec<Layer>),
}

impl<'de> Deserialize<'de> for LayerList {
    /// Deserializes by hand, so that an error in a list names the number of the layer.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = LayerList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of blocks or a list of layers")
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<LayerList, E> {
                Ok(LayerList::Count(count as usize))
            }

            fn visit_i64<E: Error>(self, count: i64) -> Result<LayerList, E> {
                count
                    .try_into()
                    .map(LayerList::Count)
                    .map_err(|_| E::invalid_value(Unexpected::Signed(count), &self))
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut items: S) -> Result<LayerList, S::Error> {
                let mut layers = Vec::new();
                loop {
                    let next = items.next_element();
                    match next.map_err(|e| {
                        S::Error::custom(format!("layer {} of the list: {e}", layers.len()))
                    })? {
                        Some(layer) => layers.push(layer),
                        None => return Ok(LayerList::List(layers)),
                    }
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Loss functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// Softmax cross-entropy of classes.
    CrossEntropy,
    /// Mean squared error.
    Mse,
    /// Mean absolute error.
    Mae,
    /// Huber loss: quadratic near the target, linear far from it.
    Huber,
    /// Binary cross-entropy of logits and targets between 0 and 1.
    BinaryCrossEntropy,
    /// Supervised contrastive loss of embeddings over the whole batch.
    Contrastive,
}

/// Optimizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Adam, with weight decay added to the gradient.
    Adam,
    /// Adagrad.
    Adagrad,
    /// RMSProp with momentum.
    Rmsprop,
    /// AdamW, with the step of each matrix scaled to the norm of the matrix.
    Lamb,
    /// Stochastic gradient descent with momentum, with the gradient of each matrix scaled to the
    /// norm of the matrix.
    Lars,
    /// Lion with decoupled weight decay.
    Lion,
}

/// Orders of the training samples: `data.order`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataOrder {
    /// Each rank draws from all shards.
    Samples,
    /// Each data-parallel rank draws from the shards that are dealt to it.
    Files,
}

/// Rules that scale the learning rate with the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    /// In proportion (Goyal et al., 2017).
    Linear,
    /// With its square root (Krizhevsky, 2014).
    Sqrt,
}

/// Behaviour of a save while the one before is still being written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenBusy {
    /// The save waits until the one before has ended.
    Wait,
    /// The save is skipped.
    Skip,
}

/// Number formats of messages: gradients, and parameters of servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MessageDtype {
    /// IEEE single precision, 32 bits.
    F32,
    /// bfloat16: 16 bits, of which 8 are the exponent.
    Bf16,
}

/// When gradients are reduced over shards: `parallel.reduce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceChoice {
    /// After each micro-batch where that saves memory, else at the end of a step.
    Auto,
    /// At the end of a step.
    Step,
    /// At the end of a step, in the order of one rank on any number of ranks.
    Blocks,
    /// After each micro-batch.
    Micro,
}

impl ReduceChoice {
    /// All choices.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Step, Self::Blocks, Self::Micro];
}

impl fmt::Display for ReduceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Step => "step",
            Self::Blocks => "blocks",
            Self::Micro => "micro",
        })
    }
}

/// The learning rate of a stale gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StaleRate {
    /// The learning rate does not depend on staleness.
    None,
    /// The learning rate is divided by one more than the updates in between.
    Inverse,
}

/// Number formats of parameters, activations and GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// The device's preferred format: bf16 on GPUs, f32 on CPUs.
    Auto,
    /// IEEE single precision.
    F32,
    /// Single precision, with operands of GEMMs rounded to 10 bits of mantissa (TF32).
    Tf32,
    /// bfloat16, with accumulation, master weights and optimizer state in f32.
    Bf16,
}

impl Compute {
    /// Returns true if only GPUs support the format.
    pub fn needs_gpu(self) -> bool {
        self == Compute::Tf32
    }

    /// Returns the size of a parameter or activation in bytes, on the host or on a GPU.
    pub fn size(self, on_host: bool) -> usize {
        if self == Compute::Bf16 && !on_host { 2 } else { 4 }
    }
}

/// Severity of log messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Logs only errors.
    Error,
    /// Logs warnings, too.
    Warn,
    /// Logs the progress of the run, too.
    Info,
    /// Logs details, too.
    Debug,
    /// Logs everything.
    Trace,
}

impl From<Level> for log::LevelFilter {
    fn from(level: Level) -> Self {
        match level {
            Level::Error => Self::Error,
            Level::Warn => Self::Warn,
            Level::Info => Self::Info,
            Level::Debug => Self::Debug,
            Level::Trace => Self::Trace,
        }
    }
}
