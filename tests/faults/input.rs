//! Invalid requests are refused with a hint.

use hpctrain_testkit::launch::{finish, mpirun, program};
use hpctrain_testkit::program as executable;

#[test]
fn an_evaluator_of_nonsense_ends_with_a_hint() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "no run").unwrap();
    let absent = root.path().join("absent/absent");
    for (run, watch, words) in [
        (root.path(), true, "is not the directory of a run"),
        (&*file, true, "is not the directory of a run"),
        (&*root.path().join("absent"), false, "does not exist"),
        // Its parent directory does not exist, so no trainer could create it.
        (&*absent, true, "does not exist"),
    ] {
        let watch = if watch { &["--watch"][..] } else { &[] };
        let place = run.to_str().unwrap();
        let mut alone = program(["eval", "--run", place]);
        let mut two = mpirun(2);
        two.arg(executable()).args(["eval", "--run", place]);
        for command in [alone.args(watch), two.args(watch)] {
            let ended = finish(command);
            assert_eq!(ended.code(), 2, "{ended}");
            assert!(
                ended.stderr.contains(words) && ended.stderr.contains("hint: give the directory"),
                "{ended}"
            );
            assert!(
                ended.stderr.contains(place) && ended.stderr.matches("error:").count() == 1,
                "{ended}"
            );
        }
    }
}
