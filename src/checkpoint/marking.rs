//! Writing and removing the marks of suspect checkpoints.

use std::fs;

use super::directory::{one_line, sync};
use super::names::step_of;
use super::suspect::{FILE, MARK, Mark, belongs};
use super::{Checkpoints, Manifest};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;

impl Checkpoints {
    /// Marks all saves of the job `job` after a step as suspect because of the finding of an SDC
    /// check: readers treat them as damaged.
    ///
    /// # Errors
    /// Returns an error if the file system refuses.
    pub fn mark_suspect_after(&self, job: &str, step: u64, why: &str) -> Result<()> {
        let mark = Mark { after: step, reason: why.to_owned() };
        let text = serde_json::to_string(&mark)
            .map_err(|e| Error::internal(format!("suspect mark: {e}")))?;
        let path = self.root().join(format!("{MARK}{job}"));
        // Several ranks may find the same difference.
        let temporary = self.root().join(format!(".{MARK}{job}.{}.tmp", std::process::id()));
        let written = own_files::write(&temporary, text + "\n")
            .and_then(|()| fs::File::open(&temporary)?.sync_all());
        written
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|e| Error::io("write", &path, e))?;
        sync(self.root())?;
        for step in self.steps()?.into_iter().filter(|&other| other > step) {
            let dir = self.path(step);
            let is_of_job =
                Manifest::read(&dir).map_or(true, |manifest| belongs(&manifest.id, job));
            if is_of_job {
                let path = dir.join(FILE);
                own_files::write(&path, format!("{why}\n"))
                    .map_err(|e| Error::io("write", &path, e))?;
            }
        }
        Ok(())
    }

    /// Removes the marks of jobs that no longer have a save here.
    pub(super) fn remove_unused_marks(&self) {
        let Ok(entries) = fs::read_dir(self.root()) else { return };
        let mut marks = Vec::new();
        let mut saves = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(job) = name.strip_prefix(MARK) {
                marks.push((entry.path(), job.to_owned()));
            } else if step_of(&name).is_some() {
                saves.push(entry.path());
            }
        }
        // Most runs have no marks, and need not read their manifests.
        if marks.is_empty() {
            return;
        }
        let saves = saves.iter().map(|save| Manifest::read(save).map(|manifest| manifest.id));
        // A save whose manifest cannot be read may be of any job.
        let Ok(saves) = saves.collect::<Result<Vec<String>>>() else { return };
        for (path, job) in marks {
            if !saves.iter().any(|id| belongs(id, &job))
                && let Err(e) = fs::remove_file(&path)
            {
                log::warn!("{}", one_line(&Error::io("remove", &path, e)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;
    use crate::manifest::tests::empty;
    use crate::{Reader, Retention};
    use hpctrain_base::error::Kind;

    /// Creates a run of the jobs `a` and `b` with these saves.
    fn run(saves: &[(&str, u64)]) -> (tempfile::TempDir, Checkpoints) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(dir.path().join("checkpoints"));
        checkpoints.prepare().unwrap();
        saves.iter().for_each(|(job, step)| publish(&checkpoints, job, *step));
        (dir, checkpoints)
    }

    fn publish(checkpoints: &Checkpoints, job: &str, step: u64) {
        let staging = checkpoints.staging(step, job);
        fs::create_dir_all(&staging).unwrap();
        Manifest { id: format!("{job}-{step}"), ..empty(step) }.write(&staging).unwrap();
        checkpoints.publish(step, &staging).unwrap();
    }

    fn kind(checkpoints: &Checkpoints, step: u64) -> Option<Kind> {
        checkpoints.open(step).map(drop).err().map(|e| e.kind())
    }

    #[test]
    fn a_save_that_is_published_after_the_mark_is_suspect_too() {
        let (_dir, checkpoints) = run(&[("a", 40), ("a", 60)]);
        checkpoints.mark_suspect_after("a", 40, "replicas differ").unwrap();
        publish(&checkpoints, "a", 80);
        for (step, expected) in [(40, None), (60, Some(Kind::Damaged)), (80, Some(Kind::Damaged))] {
            assert_eq!(kind(&checkpoints, step), expected, "{step}");
        }
        // The job that resumes from step 40 is another one.
        publish(&checkpoints, "b", 60);
        publish(&checkpoints, "b", 90);
        assert_eq!([60, 90].map(|step| kind(&checkpoints, step)), [None, None]);
        let through_a_link = Reader::open(&checkpoints.path(80)).map(drop).unwrap_err().to_string();
        assert!(through_a_link.contains("is suspect: replicas differ"), "{through_a_link}");
    }

    #[test]
    fn a_mark_that_cannot_be_read_marks_as_suspect() {
        type Make = fn(&Path);
        let makes: [(&str, Make); 5] = [
            ("bytes", |path| fs::write(path, b"\xff\xfe").unwrap()),
            ("a directory", |path| fs::create_dir(path).unwrap()),
            ("a link to nothing", |path| symlink("nothing", path).unwrap()),
            ("a loop", |path| symlink(path, path).unwrap()),
            ("a pipe", |path| {
                let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
                assert!(made.success());
            }),
        ];
        for (what, make) in makes {
            let (_dir, checkpoints) = run(&[("a", 40), ("a", 60), ("b", 80)]);
            make(&checkpoints.path(40).join(FILE));
            make(&checkpoints.root().join(format!("{MARK}b")));
            let kinds = [40, 60, 80].map(|step| kind(&checkpoints, step));
            assert_eq!(kinds, [Some(Kind::Damaged), None, Some(Kind::Damaged)], "{what}");
        }
    }

    #[test]
    fn retention_does_not_count_suspect_checkpoints() {
        let (_dir, checkpoints) = run(&[("a", 40), ("a", 60), ("a", 80)]);
        let keep = Retention { newest: 3, ..Retention::default() };
        checkpoints.retain(&keep);
        checkpoints.mark_suspect_after("a", 40, "replicas differ").unwrap();
        publish(&checkpoints, "b", 90);
        publish(&checkpoints, "b", 130);
        checkpoints.retain(&keep);
        assert_eq!(checkpoints.steps().unwrap(), [40, 60, 80, 90, 130]);
        publish(&checkpoints, "b", 140);
        checkpoints.retain(&keep);
        assert_eq!(checkpoints.steps().unwrap(), [90, 130, 140]);
    }

    #[test]
    fn marks_go_with_the_last_save_of_their_job() {
        let (_dir, checkpoints) = run(&[("a", 40), ("a", 60)]);
        checkpoints.mark_suspect_after("a", 40, "replicas differ").unwrap();
        let mark = checkpoints.root().join(format!("{MARK}a"));
        checkpoints.prepare().unwrap();
        assert!(mark.exists());
        publish(&checkpoints, "b", 40);
        publish(&checkpoints, "b", 60);
        checkpoints.prepare().unwrap();
        assert!(!mark.exists());
    }
}
