//! HDF5 files as other programs write them: each is read correctly or refused with the name of the
//! cause, and only damaged files are called damaged.

use std::path::Path;

use hpctrain::data::{
    DataSpec, Dataset, Ids, SampleMut, SampleSpec, Split, Target, inspect, verify,
};
use hpctrain::error::{Kind, Result};
use serde_json::Value;

use hpctrain_testkit::launch::inherits_nothing;
use hpctrain_testkit::python::python_with;

/// Writes the files into `folder`, and returns the expected result of each; `None` if there is no
/// Python with h5py.
fn cases(folder: &Path) -> Option<Vec<Value>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/odd_hdf5.py");
    let made =
        inherits_nothing(python_with("h5py, numpy")?.arg(script).arg(folder)).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(serde_json::from_slice(&made.stdout).unwrap())
}

/// Returns the features and targets of all rows.
fn read(case: &Value, path: &Path) -> Result<(Vec<f32>, Vec<f32>)> {
    let number = |key: &str| case[key].as_u64().map(|n| n as usize);
    let target = match (number("classes"), number("values")) {
        (Some(classes), _) => Target::Class(classes),
        (None, Some(values)) => Target::Values(values),
        (None, None) => panic!("{case} has neither classes nor values"),
    };
    let shape: Vec<usize> =
        case["input"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
    let samples = SampleSpec::Rows { input: shape.iter().product(), ids: Ids::None, target };
    let mut spec = DataSpec { samples, ..DataSpec::new(path) };
    for (key, value) in case["set"].as_object().unwrap() {
        match key.as_str() {
            "inputs" => spec.inputs = value.as_str().unwrap().to_owned(),
            "targets_name" => spec.targets = value.as_str().unwrap().to_owned(),
            other => panic!("{other}?"),
        }
    }
    let mut dataset = Dataset::open(&spec, Split::Train, 1)?;
    let sizes = dataset.sizes();
    let rows = dataset.samples() as usize;
    let mut features = vec![0.0; sizes.features * rows];
    let mut classes = vec![0; sizes.classes * rows];
    let mut values = vec![0.0; sizes.values * rows];
    let into = SampleMut {
        features: &mut features,
        classes: &mut classes,
        values: &mut values,
        ..SampleMut::default()
    };
    dataset.read_run(0, rows, 0, into)?;
    values.extend(classes.iter().map(|class| *class as f32));
    Ok((features, values))
}

/// Returns what is wrong with the result of a file, if anything.
fn judge(case: &Value, path: &Path) -> Option<String> {
    let numbers = |key: &str| -> Option<Vec<f32>> {
        Some(case[key].as_array()?.iter().map(|x| x.as_f64().unwrap() as f32).collect())
    };
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    match (read(case, path), numbers("features"), case["refused"].as_array()) {
        (Ok((features, targets)), Some(wanted), _) => {
            let wanted_targets = numbers("targets").unwrap();
            let is_right = bits(&features) == bits(&wanted) && targets == wanted_targets;
            (!is_right).then(|| {
                format!("read {features:?} {targets:?}, wanted {wanted:?} {wanted_targets:?}")
            })
        }
        (Ok(read), None, _) => Some(format!("read as {read:?}")),
        (Err(e), _, None) => Some(format!("refused: {e}")),
        (Err(e), _, Some(words)) => {
            let text = e.to_string();
            let missing =
                words.iter().map(|word| word.as_str().unwrap()).find(|word| !text.contains(word));
            let damaged = case["damaged"].as_bool() == Some(true);
            if let Some(word) = missing {
                Some(format!("{word:?} is missing in: {text}"))
            } else if damaged != text.contains("damaged") {
                Some(format!("damaged or not: {text}"))
            } else if !damaged
                && (e.kind() != Kind::Input
                    || text.lines().count() != 2
                    || !text.contains("\nhint: "))
            {
                Some(format!("no line with a hint, exit code 2: {text}"))
            } else {
                None
            }
        }
    }
}

#[test]
fn odd_files_are_read_right_or_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let Some(cases) = cases(folder.path()) else {
        eprintln!(
            "skipped: no python3 with h5py; scripts/setup --test fetches it, or PYTHON names one"
        );
        return;
    };
    assert!(cases.len() >= 40, "{} cases", cases.len());
    let path = |case: &Value| folder.path().join(format!("{}.h5", case["name"].as_str().unwrap()));
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            Some(format!("{}: {}", case["name"].as_str()?, judge(case, &path(case))?))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} files\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    let inspected = inspect::inspect(&folder.path().join("dimensions.h5")).unwrap();
    let names: Vec<&str> =
        inspected.files[0].datasets.iter().map(|dataset| &dataset.name[..]).collect();
    assert_eq!(names, ["/inputs", "/targets"], "coordinates of axes are not samples");
    // The commands that inspect any file must handle them, too, and call none damaged.
    for case in cases.iter().filter(|case| case["damaged"].as_bool() != Some(true)) {
        for error in [inspect::inspect(&path(case)).err(), verify::verify(&path(case)).err()]
            .into_iter()
            .flatten()
        {
            let text = error.to_string();
            let name = &case["name"];
            let problem = text.lines().next().unwrap();
            assert!(!problem.contains("damaged"), "{name}: {text}");
        }
    }
}
