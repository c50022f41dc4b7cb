//! Finds the in-memory checkpoints that earlier jobs of a run have left.
//!
//! The ranks of a node verify the slots there together, and all ranks exchange what they have
//! found. A step is whole if some node has a slot of every rank of its job.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::node_directory::NodeDirectory;
use super::slot::{Slot, UNFINISHED};
use crate::Progress;
use crate::manifest::Manifest;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_device::Backend;

/// The place of the in-memory checkpoints of a run on this node.
#[derive(Debug, Clone)]
pub struct NodeSlots {
    /// The directory in the memory of this node.
    pub node: NodeDirectory,
    /// The directory on a disk of this node.
    pub disk: Option<NodeDirectory>,
    /// Other directories on this node that earlier jobs of the run have used, but for those of
    /// `earlier_on_disk`.
    pub earlier: Vec<NodeDirectory>,
    /// Directories on disks that earlier jobs have used, if this one has another on a disk.
    pub earlier_on_disk: Vec<NodeDirectory>,
    /// The id of the run.
    pub run: String,
    /// The name of the node.
    pub host: String,
    /// This rank among the ranks of its node, and their number.
    pub share: [usize; 2],
}

/// A verified slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Found {
    job: String,
    outline_crc32: u32,
    rank: usize,
    ranks: usize,
    step: u64,
    updates: u64,
    position: u64,
    /// The path of the file on its node.
    file: PathBuf,
}

/// An in-memory checkpoint that is whole: every rank of its job has a verified slot on some node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The job that wrote it.
    pub job: String,
    /// The progress of the run.
    pub progress: Progress,
    pub(super) outline_crc32: u32,
    /// For every rank of the job, the nodes with a slot of it and the paths of the files.
    pub(super) slots: Vec<BTreeMap<String, PathBuf>>,
}

/// An in-memory checkpoint that is passed over.
#[derive(Debug, PartialEq, Eq)]
struct Incomplete {
    /// The checkpoint and the reason.
    what: String,
    /// Whether the reason may be that its job was killed, since another one of the job is whole.
    is_interrupted: bool,
}

/// Finds the whole in-memory checkpoints of steps until `last` on rank 0, newest first. Logs slots
/// that are passed over with the reasons. Collective over `world`.
///
/// # Errors
/// Returns an error if a message between ranks fails.
pub fn find<B: Backend>(world: &Group<B>, here: &NodeSlots, last: u64) -> Result<Vec<Candidate>> {
    let last = world.broadcast_numbers(&[last])?.first().copied().unwrap_or(0);
    let found = here.found();
    let messages = world.gather_bytes(encoded(&(&here.host, &found))?).wait()?;
    let all: Vec<(String, Vec<Found>)> =
        messages.iter().map(|bytes| decoded(bytes)).collect::<Result<_>>()?;
    let (mut found, incomplete) = candidates(&all);
    found.retain(|candidate| candidate.progress.step <= last);
    if world.rank() == 0 {
        for Incomplete { what, is_interrupted } in &incomplete {
            let level = if *is_interrupted { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "passing over {what}");
        }
    }
    Ok(found)
}

impl NodeSlots {
    /// Removes all slots on this node but those of `kept`, whose memory the next ones need. Those
    /// on a disk stay until there are newer ones on a disk.
    pub fn keep_only(&self, kept: Option<&Candidate>) {
        if self.share[0] > 0 {
            return;
        }
        let Some(kept) = kept else {
            self.node.remove();
            return self.earlier.iter().for_each(NodeDirectory::remove);
        };
        let files: BTreeSet<&PathBuf> =
            kept.slots.iter().filter_map(|places| places.get(&self.host)).collect();
        for directory in std::iter::once(&self.node).chain(&self.earlier) {
            directory.remove_others(&kept.job);
            for slot in directory.slots(&kept.job).unwrap_or_default() {
                if !files.contains(&slot) {
                    // A slot that stays costs memory, but does no harm.
                    let _ = std::fs::remove_file(slot);
                }
            }
        }
    }

    /// Removes all slots on this node.
    pub fn remove(&self) {
        self.directories().for_each(NodeDirectory::remove);
    }

    /// Returns the directories on this node.
    pub(super) fn directories(&self) -> impl Iterator<Item = &NodeDirectory> {
        std::iter::once(&self.node)
            .chain(&self.disk)
            .chain(&self.earlier)
            .chain(&self.earlier_on_disk)
    }

    /// Verifies this rank's share of the slots on its node.
    fn found(&self) -> Vec<Found> {
        let mut all = Vec::new();
        // Slots in memory come first, and are preferred.
        for node in self.directories() {
            for job in listed(node.jobs()) {
                all.extend(listed(node.slots(&job)).into_iter().map(|slot| (job.clone(), slot)));
            }
        }
        let [first, step] = self.share;
        let mut found = Vec::new();
        for (job, path) in all.into_iter().skip(first).step_by(step) {
            let slot = match Slot::open(&path) {
                Ok(slot) => slot,
                Err(e) => {
                    // A kill leaves slots that were being written.
                    let is_interrupted = e.message().ends_with(UNFINISHED);
                    let level = if is_interrupted { log::Level::Info } else { log::Level::Warn };
                    log::log!(level, "passing over an in-memory checkpoint: {}", e.message());
                    continue;
                }
            };
            if slot.header.run != self.run || slot.header.job != job {
                log::warn!("passing over {}: it is of another run", path.display());
                continue;
            }
            let Progress { step, updates, position } = slot.progress;
            found.push(Found {
                job,
                outline_crc32: slot.header.outline_crc32,
                rank: slot.header.rank,
                ranks: slot.header.ranks,
                step,
                updates,
                position,
                file: path,
            });
        }
        found
    }
}

/// Returns what a directory has; nothing, with a warning, if it cannot be read: others may have
/// whole slots, as after the failure of a disk.
fn listed<T>(entries: Result<Vec<T>>) -> Vec<T> {
    entries.unwrap_or_else(|e| {
        log::warn!("in-memory checkpoints are passed over: {}", e.to_string().replace('\n', "; "));
        vec![]
    })
}

/// Returns the whole in-memory checkpoints of which the nodes have these slots, newest first, and
/// descriptions of the others.
fn candidates(all: &[(String, Vec<Found>)]) -> (Vec<Candidate>, Vec<Incomplete>) {
    let mut steps: BTreeMap<(u64, &str), Vec<(&str, &Found)>> = BTreeMap::new();
    for (host, found) in all {
        for one in found {
            steps.entry((one.step, &one.job)).or_default().push((host, one));
        }
    }
    let mut whole = Vec::new();
    let mut incomplete = Vec::new();
    for ((step, job), slots) in steps.into_iter().rev() {
        let Some((_, first)) = slots.first() else { continue };
        let of_ranks: BTreeSet<usize> = slots.iter().map(|(_, one)| one.rank).collect();
        let agree = slots.iter().all(|(_, one)| {
            let numbers = |found: &Found| {
                [found.ranks as u64, found.updates, found.position, found.outline_crc32.into()]
            };
            numbers(one) == numbers(first)
        });
        let missing = (0..first.ranks).find(|rank| !of_ranks.contains(rank));
        let why = match missing {
            _ if !agree => Some("its slots are of different jobs or steps".to_string()),
            Some(rank) => Some(format!("no node has a whole slot of rank {rank}")),
            None => None,
        };
        if let Some(why) = why {
            let what = format!("the in-memory checkpoint of step {step}: {why}");
            incomplete.push((job, Incomplete { what, is_interrupted: agree }));
            continue;
        }
        let mut places = vec![BTreeMap::new(); first.ranks];
        for (host, one) in &slots {
            places[one.rank].entry((*host).to_string()).or_insert_with(|| one.file.clone());
        }
        whole.push(Candidate {
            job: job.to_string(),
            progress: Progress { step, updates: first.updates, position: first.position },
            outline_crc32: first.outline_crc32,
            slots: places,
        });
    }
    let incomplete = incomplete.into_iter().map(|(job, one)| {
        let has_whole = whole.iter().any(|other: &Candidate| other.job == job);
        Incomplete { is_interrupted: one.is_interrupted && has_whole, ..one }
    });
    let incomplete = incomplete.collect();
    (whole, incomplete)
}

impl Candidate {
    /// Returns the directory of its slots on this node, for display; that in memory if there are
    /// none.
    pub fn place(&self, here: &NodeSlots) -> PathBuf {
        let file = self.slots.iter().find_map(|places| places.get(&here.host));
        let directory = file.and_then(|file| file.parent());
        directory.map_or_else(|| here.node.path().join(&self.job), PathBuf::from)
    }
}

impl NodeDirectory {
    /// Returns the newest outline of run `run` on this node, with the step of one of its slots,
    /// whole or not. The settings that stay the same for a run are in any of them.
    pub fn newest_outline(&self, run: &str) -> Option<Manifest> {
        let mut newest: Option<Manifest> = None;
        for job in self.jobs().ok()? {
            for path in self.slots(&job).unwrap_or_default() {
                let Ok(slot) = Slot::open_header(&path) else { continue };
                let step = slot.progress.step;
                if slot.header.run == run
                    && newest.as_ref().is_none_or(|newest| newest.step < step)
                    && let Some(outline) = self.outline(&job, slot.header.outline_crc32)
                    && let Ok(outline) = serde_json::from_slice::<Manifest>(&outline)
                {
                    newest = Some(Manifest { step, ..outline });
                }
            }
        }
        newest
    }
}

/// Returns a message to other ranks.
pub(super) fn encoded(message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message).map_err(|e| Error::internal(e.to_string()))
}

/// Returns the message of another rank.
pub(super) fn decoded<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::comm(format!("a rank sent a malformed list of slots: {e}")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::slot::{Header, SlotWriter};
    use super::*;

    /// Writes a slot of job `job`, the only one of run "run", without elements; returns its path.
    fn write(node: &NodeDirectory, job: &str, number: usize, step: u64) -> PathBuf {
        let path = node.create_job(job).unwrap().join(format!("rank-00000.own.{number}"));
        let header = Header {
            run: "run".into(),
            job: job.into(),
            rank: 0,
            ranks: 1,
            outline_crc32: 7,
            state: vec![],
            arrays: vec![],
            pieces: vec![],
        };
        let mut slot = SlotWriter::create(&path, &header).unwrap();
        slot.begin().unwrap();
        slot.finish(Progress { step, updates: step, position: step }).unwrap();
        path
    }

    /// Returns the places of a run with one node.
    fn here(node: NodeDirectory, earlier: Vec<NodeDirectory>) -> NodeSlots {
        let host = "a".to_string();
        let run = "run".to_string();
        let earlier_on_disk = vec![];
        NodeSlots { node, disk: None, earlier, earlier_on_disk, run, host, share: [0, 1] }
    }

    /// Other slots of the job would take the memory of the next ones, and copies on a disk are
    /// needed after a reboot.
    #[test]
    fn only_the_slots_of_a_candidate_and_those_on_disks_stay() {
        let root = tempfile::tempdir().unwrap();
        let of = |name: &str| NodeDirectory::new(&root.path().join(name), Path::new("/runs/x"));
        let [node, earlier, disk] = ["shm", "earlier", "disk"].map(of);
        let kept = write(&earlier, "job", 0, 6);
        let others = [
            write(&earlier, "job", 1, 5),
            write(&earlier, "before", 0, 4),
            write(&node, "before", 0, 3),
        ];
        let on_disk = write(&disk, "before", 0, 4);
        let here = NodeSlots { earlier_on_disk: vec![disk], ..here(node, vec![earlier]) };
        let (whole, _) = candidates(&[("a".into(), here.found())]);
        here.keep_only(whole.first());
        assert!(kept.exists() && on_disk.exists());
        assert!(!others.iter().any(|slot| slot.exists()), "{others:?}");
        here.keep_only(None);
        assert!(!kept.exists() && on_disk.exists());
        here.remove();
        assert!(!on_disk.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_read_hides_no_other() {
        let root = tempfile::tempdir().unwrap();
        let of = |name: &str| NodeDirectory::new(&root.path().join(name), Path::new("/runs/x"));
        let [node, broken, disk] = ["shm", "broken", "disk"].map(of);
        let files = [write(&node, "job", 0, 5), write(&disk, "before", 0, 4)];
        std::fs::create_dir_all(broken.path().parent().unwrap()).unwrap();
        std::fs::write(broken.path(), "a file").unwrap();
        let found = here(node, vec![broken, disk]).found();
        let found: Vec<PathBuf> = found.into_iter().map(|one| one.file).collect();
        assert_eq!(found, files);
    }

    fn found(rank: usize, step: u64) -> Found {
        Found {
            job: "job".into(),
            outline_crc32: 7,
            rank,
            ranks: 2,
            step,
            updates: step,
            position: 8 * step,
            file: format!("rank-{rank:05}.own.{}", step % 2).into(),
        }
    }

    #[test]
    fn a_step_is_whole_with_a_slot_of_every_rank() {
        let [a, b] = ["a", "b"].map(String::from);
        let nodes = [
            (a.clone(), vec![found(0, 5), found(0, 6)]),
            (b.clone(), vec![found(1, 4), found(1, 5)]),
        ];
        let (whole, incomplete) = candidates(&nodes);
        assert_eq!(whole.len(), 1);
        assert_eq!(whole[0].progress, Progress { step: 5, updates: 5, position: 40 });
        let places = |host: &String, file: &str| BTreeMap::from([(host.clone(), file.into())]);
        assert_eq!(
            whole[0].slots,
            [places(&a, "rank-00000.own.1"), places(&b, "rank-00001.own.1")]
        );
        // A kill leaves such ones and a whole one, so they need no warning.
        let why = |step, rank| Incomplete {
            what: format!(
                "the in-memory checkpoint of step {step}: no node has a whole slot of rank {rank}"
            ),
            is_interrupted: true,
        };
        assert_eq!(incomplete, [why(6, 1), why(4, 0)]);
    }

    #[test]
    fn slots_of_different_jobs_are_not_mixed() {
        let other = Found { job: "other".into(), ..found(1, 5) };
        let (whole, incomplete) = candidates(&[("a".into(), vec![found(0, 5), other.clone()])]);
        assert!(whole.is_empty() && incomplete.len() == 2);
        assert!(incomplete.iter().all(|one| !one.is_interrupted), "{incomplete:?}");
        let longer = Found { position: 41, ..found(1, 5) };
        let (whole, incomplete) = candidates(&[("a".into(), vec![found(0, 5), longer])]);
        let one = &incomplete[0];
        assert!(whole.is_empty() && one.what.contains("different jobs"), "{incomplete:?}");
        assert!(!one.is_interrupted);
    }
}
