//! Weights of samples: their effect on gradients, their sources, and the same bits as on one rank
//! in every layout.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hpctrain::backend::RegressionLoss;
use hpctrain::backend::cpu::Cpu;
use hpctrain::comm;
use hpctrain::data::import::{
    Arrays, ImportCsv, ImportNumpy, ImportOptions, NotFinite, import_csv, import_numpy,
};
use hpctrain::data::{
    Batch, DataSpec, Dataset, Ids, SampleFields, SampleMut, SampleSpec, Split, Target, inspect,
    verify,
};
use hpctrain::error::Result;
use hpctrain::mesh::Mesh;
use hpctrain::nn::layers::{Layer, Layers};
use hpctrain::nn::loss::Loss;
use hpctrain::nn::{MicroBatch, Network};
use hpctrain::optim::UpdateRule;
use hpctrain::parallel::{ControlFlags, Zero};

use hpctrain_testkit::launch::Transport::{self, Alone, Mpirun, Simulate};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::{Cut, distance, engine_on, gradients};

fn kept(out: PathBuf) -> ImportOptions {
    ImportOptions { not_finite: NotFinite::Error, every: 4, shards: 2, normalize: false, out }
}

/// Returns the sum of the losses and all gradients of the samples with these numbers and weights.
fn learned(loss: &Loss, samples: &[usize], weights: &[f32]) -> (f64, Vec<(String, Vec<f32>)>) {
    let layers: toml::Table = toml::from_str(
        "layers = [{kind='dense', units=5}, {kind='tanh'}, {kind='dense', units=3}]",
    )
    .unwrap();
    let layers: Vec<Layer> = layers["layers"].clone().try_into().unwrap();
    let network = Network::Layers(Layers::new(&[4], &layers).unwrap());
    let one = Mesh { pipeline: 1, replica: 1, shard: 1, tensor: 1 };
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let b = Cpu::new(2);
    // The loss is a mean over four predictions, however many samples there are: sums are compared.
    let mut engine = engine_on(
        b.clone(),
        &comm::single(),
        &network,
        loss.clone(),
        one,
        Zero::Zero,
        rule,
        Cut::WHOLE,
        4,
    );
    let of = |width: usize| {
        let number = move |i: usize| (i as f32 * 1.7).sin();
        samples
            .iter()
            .flat_map(|sample| (0..width).map(move |i| number(sample * width + i)))
            .collect::<Vec<f32>>()
    };
    let (classes, values) = match loss {
        Loss::CrossEntropy { .. } => {
            (samples.iter().map(|sample| *sample as u32 % 3).collect(), vec![])
        }
        Loss::Deviation(_) | Loss::Custom(_) => (vec![], of(3)),
    };
    let features = of(4);
    let parts = SampleFields {
        features: &*features,
        classes: &*classes,
        values: &*values,
        weights,
        ..SampleFields::default()
    };
    let micro = MicroBatch::upload(&b, parts, samples.len(), 1, 0).unwrap();
    let mut micro = Some(micro);
    let loss = engine.gradients(0, || Ok(micro.take().unwrap()), ControlFlags::empty).unwrap().loss;
    (loss, gradients(&engine))
}

/// Serialises the tests: a child that starts while another test writes a file through HDF5 inherits
/// its descriptor, and keeps it locked until it ends.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_whole_weight_is_as_many_copies_and_none_is_no_sample() {
    let _alone = alone();
    let weighted = Loss::CrossEntropy { smoothing: 0.1, weights: vec![1.0, 0.5, 2.0] };
    let deviations = [
        RegressionLoss::Squared,
        RegressionLoss::Absolute,
        RegressionLoss::Huber(0.5),
        RegressionLoss::BinaryCrossEntropy,
    ];
    for loss in [Loss::cross_entropy(), weighted].into_iter().chain(deviations.map(Loss::Deviation))
    {
        let (sum, grads) = learned(&loss, &[0, 1, 2, 3], &[2.0, 0.0, 1.0, 3.0]);
        let (expected, copies) = learned(&loss, &[0, 0, 2, 3, 3, 3], &[]);
        assert!((sum / expected - 1.0).abs() < 1e-6, "{loss:?}: {sum}, {expected}");
        for ((name, got), (_, want)) in grads.iter().zip(&copies) {
            let want: Vec<f64> = want.iter().map(|x| f64::from(*x)).collect();
            assert!(want.iter().any(|x| *x != 0.0), "{loss:?}: {name}");
            let off = distance(got, &want);
            assert!(off < 1e-6, "{loss:?}: {name}: {off:e}");
        }
        // Rows with weight 0 may hold anything.
        let (_, other) = learned(&loss, &[0, 9, 2, 3], &[2.0, 0.0, 1.0, 3.0]);
        let bits = |grads: &[(String, Vec<f32>)]| -> Vec<u32> {
            grads.iter().flat_map(|(_, grad)| grad.iter().map(|x| (x + 0.0).to_bits())).collect()
        };
        assert_eq!(bits(&other), bits(&grads), "{loss:?}");
        // A weight of 1 changes nothing.
        let (sum, ones) = learned(&loss, &[0, 1, 2], &[1.0; 3]);
        let (want, none) = learned(&loss, &[0, 1, 2], &[]);
        assert_eq!((sum.to_bits(), bits(&ones)), (want.to_bits(), bits(&none)), "{loss:?}");
    }
}

/// Creates a file like those of another program: four rows of two inputs, a class each, and perhaps
/// weights.
fn foreign(path: &Path, weights: Option<&[f64]>, name: &str, shape: &[usize]) {
    let file = crate::create_hdf5(path);
    let inputs: Vec<f32> = (0..8).map(|i| i as f32).collect();
    file.new_dataset::<f32>().shape([4, 2]).create("inputs").unwrap().write_raw(&inputs).unwrap();
    file.new_dataset::<u8>()
        .shape(4)
        .create("targets")
        .unwrap()
        .write_raw(&[0u8, 1, 2, 1])
        .unwrap();
    if let Some(weights) = weights {
        file.new_dataset::<f64>().shape(shape).create(name).unwrap().write_raw(weights).unwrap();
    }
}

fn open(path: &Path, weights: Option<&str>, split: Split) -> Result<Dataset> {
    let samples = SampleSpec::Rows { input: 2, ids: Ids::None, target: Target::Class(3) };
    let weights = weights.map(str::to_owned);
    Dataset::open(&DataSpec { samples, weights, ..DataSpec::new(path) }, split, 1)
}

/// Returns the weights of all samples, read one by one and together; `None` if they have none.
fn weights(mut dataset: Dataset) -> Result<Option<Vec<f32>>> {
    let sizes = dataset.sizes();
    let all = dataset.samples();
    let batch = Batch::read(&mut dataset, 0..all, 0..all)?;
    if sizes.weights == 0 {
        assert!(batch.parts.weights.is_empty());
        return Ok(None);
    }
    for sample in 0..all {
        let mut features = [0.0; 2];
        let mut classes = [0];
        let mut weights = [-1.0];
        let classes = &mut classes[..sizes.classes];
        let into = SampleMut {
            features: &mut features,
            classes,
            weights: &mut weights,
            ..SampleMut::default()
        };
        dataset.read(sample, into)?;
        assert_eq!(weights[0].to_bits(), batch.parts.weights[sample as usize].to_bits());
    }
    Ok(Some(batch.parts.weights))
}

#[test]
fn weights_are_read_where_they_are_unless_configured_otherwise() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let of = [[0.5, 0.0, 2.0, 1.25], [1.0, 3.0, 0.25, 7.0]];
    foreign(&root.path().join("train-0.h5"), Some(&of[0]), "weights", &[4]);
    foreign(&root.path().join("train-1.h5"), Some(&of[1]), "weights", &[4, 1]);
    foreign(&root.path().join("val-0.h5"), None, "", &[]);
    let read = |weights_of| weights(open(root.path(), weights_of, Split::Train).unwrap()).unwrap();
    let want: Vec<f32> = of.as_flattened().iter().map(|x| *x as f32).collect();
    assert_eq!(read(None), Some(want.clone()));
    assert_eq!(read(Some("/weights")), Some(want));
    assert_eq!(read(Some("")), None);
    assert_eq!(weights(open(root.path(), None, Split::Validation).unwrap()).unwrap(), None);
    // Shapes may differ, unlike those of other datasets; validation needs no weights.
    let report = verify::verify(root.path()).unwrap();
    assert_eq!((report.files, report.ids, report.numbers), (3, 12, 32), "{report}");
    assert!(
        inspect::inspect(root.path())
            .unwrap()
            .to_string()
            .contains("train-1.h5  /weights  4 x 1  float64")
    );
}

#[test]
fn invalid_weights_are_reported_with_their_place() {
    let _alone = alone();
    let refused = |of: &[f64], shape: &[usize], named: Option<&str>| {
        let root = tempfile::tempdir().unwrap();
        foreign(&root.path().join("train-0.h5"), Some(&[1.0; 4]), "weights", &[4]);
        foreign(&root.path().join("train-1.h5"), (!of.is_empty()).then_some(of), "weights", shape);
        let error = open(root.path(), named, Split::Train).and_then(weights).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let error = error.to_string();
        assert!(error.contains("\nhint: "), "{error}");
        let verified =
            verify::verify(root.path()).map(|_| String::new()).unwrap_or_else(|e| e.to_string());
        (error, verified)
    };
    for (of, shown) in [(-0.5, "-0.5"), (f64::NAN, "NaN"), (f64::INFINITY, "inf"), (1e300, "inf")] {
        let (error, verified) = refused(&[1.0, 1.0, of, 1.0], &[4], None);
        for error in [&error, &verified] {
            assert!(error.contains(&format!("train-1.h5: /weights[2] is {shown}")), "{error}");
        }
    }
    let (_, verified) = refused(&[-1.0, 1.0, -1.0, 1.0], &[4], None);
    assert!(
        verified.contains("/weights has 2 elements in all that are not valid weights"),
        "{verified}"
    );
    for (of, shape, named, wanted) in [
        (
            &[1.0; 3][..],
            &[3][..],
            None,
            "train-1.h5: /weights has shape 3, but there are 4 samples",
        ),
        (&[1.0; 8], &[4, 2], None, "train-1.h5: /weights has shape 4 x 2, but there are 4 samples"),
        (&[], &[], None, "train-1.h5 has none, "),
        (&[1.0; 4], &[4], Some("/factors"), "train-0.h5: has no dataset /factors\nhint: "),
    ] {
        let (error, verified) = refused(of, shape, named);
        assert!(error.contains(wanted), "{error}");
        assert!(named.is_some() || verified.contains(wanted), "{verified}");
    }
}

#[test]
fn data_sets_with_and_without_weights_do_not_mix() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let some = root.path().join("some.h5");
    let none = root.path().join("none.h5");
    foreign(&some, Some(&[1.0; 4]), "weights", &[4]);
    foreign(&none, None, "", &[]);
    let samples = SampleSpec::Rows { input: 2, ids: Ids::None, target: Target::Class(3) };
    let specs = |weights: Option<String>| {
        [&some, &none].map(|path| DataSpec {
            samples: samples.clone(),
            weights: weights.clone(),
            ..DataSpec::new(path)
        })
    };
    let error = Dataset::open_all(&specs(None), Split::Train, 1).err().unwrap().to_string();
    assert!(
        error.contains("set of weights differs: ") && error.contains("none.h5 has none, "),
        "{error}"
    );
    assert!(error.contains(
        "\nhint: give every training shard weights, or leave them unread: data.weights = \"\""
    ));
    assert_eq!(
        weights(Dataset::open_all(&specs(Some(String::new())), Split::Train, 1).unwrap()).unwrap(),
        None
    );
}

#[test]
fn tables_have_a_column_of_weights() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let input = root.path().join("table.csv");
    let table = "x,w,kind,y\n1,0.5,0,2\n2,0,1,3\n3,1,2,4\n4,2,0,5\n5,3,1,6\n6,nan,2,7\n";
    let import = |table: &str, weight: &str, not_finite, name: &str| {
        std::fs::write(&input, table).unwrap();
        let targets = vec!["kind".into()];
        let weight = Some(weight.into());
        let kept = ImportOptions { not_finite, ..kept(root.path().join(name)) };
        import_csv(&ImportCsv { targets, weight, ..ImportCsv::new(input.clone(), kept) })
    };
    let imported = import(table, "w", NotFinite::Skip, "out").unwrap();
    assert_eq!((imported.shape, imported.classes, imported.skipped), (vec![2], Some(3), 1));
    let of = |split| weights(open(&root.path().join("out"), None, split).unwrap()).unwrap();
    assert_eq!(
        (of(Split::Train), of(Split::Validation)),
        (Some(vec![0.5, 0.0, 1.0, 3.0]), Some(vec![2.0]))
    );
    for (table, weight, wanted) in [
        ("x,w,kind\n1,1,0\n2,-1,1\n", "w", "line 3, column \"w\": a weight of -1, less than 0"),
        ("x,w,kind\n1,,0\n2,1,1\n", "w", "line 2, column \"w\": \"\" is a missing value"),
        (
            "x,w,kind\n1,1,0\n2,1,1\n",
            "v",
            "there is no column \"v\"\nhint: its columns: x, w, kind",
        ),
        ("x,w,kind\n1,1,0\n2,1,1\n", "kind", "--target and --weight both name column \"kind\""),
        ("w,kind\n1,0\n", "w", "2 columns, 1 of them targets"),
    ] {
        let error = import(table, weight, NotFinite::Error, "refused").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains(wanted) && error.to_string().contains("\nhint: "),
            "{error}"
        );
    }
}

#[test]
fn arrays_have_one_of_weights() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let npy = |name: &str, shape: &str, numbers: &[f32]| {
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
        let length = (header.len() as u16).to_le_bytes();
        let elements: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let path = root.path().join(name);
        std::fs::write(
            &path,
            [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), &elements].concat(),
        )
        .unwrap();
        path
    };
    let features = npy("x.npy", "(3, 2)", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let labels = npy("y.npy", "(3,)", &[0.0, 1.0, 2.0]);
    let import = |weights: PathBuf, name: &str| {
        let arrays = Arrays::Files {
            features: features.clone(),
            labels: Some(labels.clone()),
            weights: Some(weights),
        };
        import_numpy(&ImportNumpy {
            arrays,
            regression: false,
            options: kept(root.path().join(name)),
        })
    };
    import(npy("w.npy", "(3, 1)", &[0.0, 1.5, 2.0]), "files").unwrap();
    let of = |name| weights(open(&root.path().join(name), None, Split::Train).unwrap()).unwrap();
    assert_eq!(of("files"), Some(vec![0.0, 1.5, 2.0]));
    for (shape, numbers, wanted) in [
        ("(2,)", &[1.0, 2.0][..], "w.npy has shape [2], but there are 3 rows"),
        ("(3,)", &[1.0, f32::NAN, 2.0], "w.npy: row 1, element 0 is NaN"),
        ("(3,)", &[1.0, 1.0, -2.0], "w.npy: row 2 has a weight of -2"),
    ] {
        let error = import(npy("w.npy", shape, numbers), "refused").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains(wanted) && error.to_string().contains("\nhint: "),
            "{error}"
        );
    }
    npy("w.npy", "(3,)", &[4.0, 5.0, 6.0]);
    let archive = root.path().join("all.npz");
    let mut zip = zip::ZipWriter::new(std::fs::File::create(&archive).unwrap());
    for name in ["x.npy", "y.npy", "w.npy"] {
        let options = zip::write::SimpleFileOptions::default()
            .compression_method(zip::CompressionMethod::Stored);
        zip.start_file(name, options).unwrap();
        std::io::Write::write_all(&mut zip, &std::fs::read(root.path().join(name)).unwrap())
            .unwrap();
    }
    zip.finish().unwrap();
    let [x, y, w] = ["x", "y", "w"].map(String::from);
    let arrays = Arrays::Archive { path: archive, features: x, labels: Some(y), weights: Some(w) };
    import_numpy(&ImportNumpy {
        arrays,
        regression: false,
        options: kept(root.path().join("archive")),
    })
    .unwrap();
    assert_eq!(of("archive"), Some(vec![4.0, 5.0, 6.0]));
}

/// Imports a table of sixty rows, whose weights are computed by `weight`.
fn table(root: &Path, name: &str, weight: Option<fn(u32) -> f64>) -> PathBuf {
    let input = root.join(format!("{name}.csv"));
    let line = |i: u32| {
        let a = i * 7 % 11;
        let b = i * 5 % 13;
        let class = i * i % 3;
        weight.map_or(format!("{a},{b},{class}\n"), |weight| {
            format!("{a},{b},{class},{}\n", weight(i))
        })
    };
    let header = if weight.is_some() { "a,b,class,w\n" } else { "a,b,class\n" };
    std::fs::write(
        &input,
        std::iter::once(header.into()).chain((0..60).map(line)).collect::<String>(),
    )
    .unwrap();
    let out = root.join(name);
    let weight = weight.map(|_| "w".into());
    let kept = ImportOptions { normalize: true, ..kept(out.clone()) };
    import_csv(&ImportCsv { targets: vec!["class".into()], weight, ..ImportCsv::new(input, kept) })
        .unwrap();
    out
}

fn run(transport: Transport, root: &Path, name: &str, data: &Path, more: &str) -> Run {
    let settings = [
        "model.kind=layers".into(),
        "model.input=[2]".into(),
        "model.layers=[{kind='dense', units=6}, {kind='tanh'}, {kind='dense', units=3}]".into(),
        "parallel.virtual_ranks=8".into(),
        "eval.samples=10".into(),
        format!("data.path={}", data.display()),
    ];
    let settings = settings.into_iter().chain(more.split_whitespace().map(String::from)).collect();
    Run { settings, ..Run::new(transport, root, name, &[]) }
}

#[test]
fn weights_have_the_bits_of_one_rank_in_every_layout() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let some = table(root.path(), "some", Some(|i| f64::from(i % 5) * 0.75));
    let none = table(root.path(), "none", None);
    let ones = table(root.path(), "ones", Some(|_| 1.0));
    let run = |transport, name: &str, data, more: &str| {
        run(transport, root.path(), name, data, more).succeeds()
    };
    let one = run(Alone, "one", &some, "");
    for (i, (transport, more)) in [
        (Alone, "batch.micro=1 run.threads=3"),
        (Mpirun(2), "parallel.zero=2"),
        (Mpirun(4), "parallel.zero=3 parallel.shard=2"),
        (Simulate(4), "parallel.zero=1"),
    ]
    .into_iter()
    .enumerate()
    {
        run(transport, &format!("layout-{i}"), &some, more).same_as(&one, 6, more);
    }
    // Weights of 1 are equivalent to none, and so are weights that are not read.
    let plain = run(Alone, "plain", &none, "");
    run(Mpirun(2), "ones", &ones, "").same_numbers_as(&plain, 6, "ones");
    run(Alone, "off", &some, "data.weights=").same_numbers_as(&plain, 6, "off");
    let losses = |files: &hpctrain_testkit::runs::RunFiles| files.numbers("metrics.jsonl", "loss");
    assert!(
        losses(&one)
            .iter()
            .zip(losses(&plain))
            .all(|(weighted, plain)| (weighted - plain).abs() > 1e-3)
    );
    // Evaluations ignore the weights: before any training step, their losses are equal.
    let start = |name, data| run(Alone, name, data, "run.steps=1 optimizer.lr=1e-30").evaluated();
    assert_eq!(start("start", &some), start("start-plain", &none));
}

#[test]
fn a_missing_dataset_of_weights_is_an_error_of_the_run() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let data = table(root.path(), "none", None);
    let ended = run(Mpirun(2), root.path(), "x", &data, "data.weights=/factors").ends();
    assert_eq!(ended.code(), 2, "{ended}");
    assert!(ended.stderr.contains("has no dataset /factors"), "{ended}");
}
