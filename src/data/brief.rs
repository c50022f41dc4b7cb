//! Descriptions of shards in messages: parts that the shard before has, too, are sent once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use super::preprocessing::DescribedPreprocessing;
use super::shard::Shard;

/// A shard without the parts that the one before has, too. Lists of values and tokenizers may be
/// long, and are mostly the same in all shards.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Brief {
    shard: Box<Shard>,
    told: Option<DescribedPreprocessing>,
    tokenizer: OfText,
}

/// The tokenizer of a shard.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum OfText {
    /// That of the shard before.
    Same,
    Own(Option<Tokenizer>),
}

/// The parts that the next shard may share, at either end.
#[derive(Debug, Default)]
pub(super) struct Before {
    told: Option<Arc<DescribedPreprocessing>>,
    tokenizer: Option<Option<Tokenizer>>,
}

impl Before {
    /// Returns the message for a shard. Its preprocessing becomes that of the shard before if both
    /// are equal.
    pub(super) fn shorten(&mut self, shard: &mut Shard) -> Brief {
        let tokenizer = match &self.tokenizer {
            Some(before) if *before == shard.header.tokenizer => OfText::Same,
            _ => {
                self.tokenizer = Some(shard.header.tokenizer.clone());
                OfText::Own(shard.header.tokenizer.clone())
            }
        };
        let told = match &self.told {
            Some(before) if *before == shard.told => {
                shard.told = before.clone();
                None
            }
            _ => {
                self.told = Some(shard.told.clone());
                Some((*shard.told).clone())
            }
        };
        let mut brief = shard.clone();
        brief.header.tokenizer = None;
        Brief { shard: Box::new(brief), told, tokenizer }
    }

    /// Returns the shard of a message; none if the message refers to a shard before that there was
    /// not.
    pub(super) fn complete(&mut self, brief: Brief) -> Option<Shard> {
        let Brief { mut shard, told, tokenizer } = brief;
        if let OfText::Own(tokenizer) = tokenizer {
            self.tokenizer = Some(tokenizer);
        }
        if let Some(told) = told {
            self.told = Some(told.into());
        }
        shard.header.tokenizer = self.tokenizer.clone()?;
        shard.told = self.told.clone()?;
        Some(*shard)
    }
}
