//! Membership of an elastic job: which processes are its ranks, and how they agree on that after a
//! loss.
//!
//! Every process has a control address, at which a thread answers whatever the rest of the process
//! does. A process monitors the next rank. Once any rank is found to be gone, by a connection that
//! ended or a rank that no longer answers, all ranks end their requests with an error of kind
//! [`Lost`](hpctrain_base::error::Kind::Lost) and report to the first rank that is not known to be
//! gone, the coordinator. It waits until every rank has reported or is gone, and writes the next
//! membership, `membership/000002.json` in the directory of the run. The file is created
//! exclusively, so of two halves of a network that was cut only one goes on. The coordinator then
//! answers the reports, and the members connect anew ([`start_tcp_mesh`](super::start_tcp_mesh)).
//!
//! A process that joins asks rank 0, which has all ranks report after a step, as after a loss.
//!
//! Source of the idea to agree through reports to the lowest live rank and a write that succeeds
//! once: leases and fencing tokens, as in Burrows, "The Chubby lock service" (OSDI 2006).

mod agreement;
mod control_plane;
mod directory;
mod messages;
mod monitor;
mod prober;
mod state;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use control_plane::{ControlPlane, MembershipOptions};
pub use directory::MembershipDirectory;

/// A process that is a rank, or asks to be one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The id of the process, which no other one has.
    pub id: String,
    /// The name of its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// The address at which it answers other processes of the job.
    pub control: SocketAddr,
    /// The address at which it listens for connections of the next membership's ranks.
    pub data: SocketAddr,
    /// The program, its version and the vector instructions: the same for all ranks, so that the bits
    /// do not depend on them.
    pub platform: String,
    /// A digest of its configuration.
    pub config: u64,
}

/// A rank that is no longer a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRank {
    /// The id of the process.
    pub id: String,
    /// The rank that it was.
    pub rank: usize,
    /// The name of its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// How it was lost, for display.
    pub why: String,
}

/// The ranks of a job from one change to the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Membership {
    /// The number, which grows with each change.
    pub number: u64,
    /// The members in the order of their ranks.
    pub members: Vec<Member>,
    /// The ranks of the membership before that were lost.
    pub lost: Vec<LostRank>,
    /// The ids of the members that have joined.
    pub joined: Vec<String>,
    /// The time at which it was agreed on, in seconds since 1970.
    pub time: f64,
}

impl Membership {
    /// Returns the rank of a process; `None` if it is not a member.
    pub fn rank(&self, id: &str) -> Option<usize> {
        self.members.iter().position(|member| member.id == id)
    }
}
