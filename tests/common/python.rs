//! Finds a Python with the modules that a test needs.

use std::process::Command;

use super::launch::inherits_nothing;

/// Returns a Python that can import `modules`: the one that `PYTHON` names, with or without the
/// modules that `scripts/setup --test` fetches, or the system's.
pub fn python_with(modules: &str) -> Option<Command> {
    let fetched = super::target().with_file_name("python");
    let named = std::env::var("PYTHON").unwrap_or("python3".into());
    let with_fetched = || {
        let mut python = Command::new(&named);
        python.env("PYTHONPATH", &fetched);
        python
    };
    let has_them = |mut python: Command| {
        let tried = inherits_nothing(python.args(["-c", &format!("import {modules}")])).output();
        tried.is_ok_and(|output| output.status.success())
    };
    let all: [&dyn Fn() -> Command; 3] =
        [&with_fetched, &|| Command::new(&named), &|| Command::new("/usr/bin/python3")];
    all.into_iter().find(|python| has_them(python())).map(|python| python())
}
