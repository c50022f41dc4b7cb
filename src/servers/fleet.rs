//! The coordinator's connections to all servers of a generation.

use std::sync::Arc;
use std::time::Duration;

use super::hub::{Halt, Hub};
use super::line::Line;
use super::message::{Assignment, FromServer, ToServer};
use super::terms::Terms;
use crate::comm::Secret;

/// The factor on the time for requests that move all of a server's memory to a disk.
const LONG: u32 = 10;

/// The servers of a generation.
pub struct Fleet {
    lines: Vec<Line>,
    hub: Arc<Hub>,
    /// The generation with whose end requests lose their sense; without it, with the loss of a server.
    within: Option<u64>,
    secret: Secret,
    patience: Duration,
}

impl Fleet {
    /// Those of the terms.
    pub fn new(terms: &Terms, hub: Arc<Hub>, secret: Secret, patience: Duration) -> Self {
        let mut fleet = Self { lines: vec![], hub, within: None, secret, patience };
        fleet.lines = terms.addresses.iter().map(|address| fleet.line(address)).collect();
        fleet
    }

    fn line(&self, address: &str) -> Line {
        Line::new("the server", address, self.secret.clone(), self.patience)
    }

    /// Connections to the same servers for another thread, on which answers may take longer.
    pub fn again(&self, generation: u64) -> Self {
        let patience = LONG * self.patience;
        let mut other = Self {
            lines: vec![],
            hub: self.hub.clone(),
            within: Some(generation),
            secret: self.secret.clone(),
            patience,
        };
        other.lines = self.lines.iter().map(|line| other.line(line.address())).collect();
        other
    }

    /// Gives every server its ranges.
    ///
    /// # Errors
    /// One is gone, or cannot hold them.
    pub fn assign(&mut self, of: impl Fn(usize) -> Assignment) -> Result<(), Halt> {
        self.all(|server| ToServer::Assign(Box::new(of(server)))).map(drop)
    }

    /// Asks all servers at the same time; returns their answers, in order.
    ///
    /// # Errors
    /// One is gone, belongs to another generation, or failed.
    pub fn all(&mut self, request: impl Fn(usize) -> ToServer) -> Result<Vec<FromServer>, Halt> {
        let sent: Vec<bool> =
            self.lines.iter_mut().enumerate().map(|(server, line)| line.send(&request(server), &[]).is_ok()).collect();
        let mut answers = Vec::with_capacity(sent.len());
        let makes_sense = || self.within.map_or(!self.hub.has_lost(), |generation| self.hub.goes_on(generation));
        for (server, (line, sent)) in self.lines.iter_mut().zip(sent).enumerate() {
            let answer = if sent { line.receive(0, &mut Vec::new()).ok() } else { None };
            let answer = match answer {
                Some(answer) => answer,
                // The connection was cut: a request that comes twice does no harm.
                None => line.ask_while(makes_sense, &request(server), &[], 0, &mut Vec::new()),
            };
            match answer.map_err(Halt::of_server)? {
                FromServer::Stale => return Err(Halt::Lost(format!("{} has begun anew", line.address()))),
                answer => answers.push(answer),
            }
        }
        Ok(answers)
    }
}
