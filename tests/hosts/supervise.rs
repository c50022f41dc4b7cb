//! Faults of hosts under `hpctrain supervise`.
