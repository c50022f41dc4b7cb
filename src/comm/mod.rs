//! Messages between ranks.
