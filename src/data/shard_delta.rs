//! Descriptions of shards in messages: parts equal to those of the previous shard are sent once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use super::preprocessing::DescribedPreprocessing;
use super::shard::Shard;

/// The description of a shard without the parts that equal those of the previous one. Lists of
/// category values and tokenizers may be long, and are usually the same in all shards.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ShardDelta {
    shard: Box<Shard>,
    preprocessing: Option<DescribedPreprocessing>,
    tokenizer: OfText,
}

/// The tokenizer of a shard in a message.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum OfText {
    /// The tokenizer equals that of the previous shard.
    Same,
    Own(Option<Tokenizer>),
}

/// The parts of the previous shard that the next one may share, kept by both sender and receiver.
#[derive(Debug, Default)]
pub(super) struct PreviousShard {
    preprocessing: Option<Arc<DescribedPreprocessing>>,
    tokenizer: Option<Option<Tokenizer>>,
}

impl PreviousShard {
    /// Returns the message for a shard. If its preprocessing equals that of the previous shard,
    /// both share one copy afterwards.
    pub(super) fn shorten(&mut self, shard: &mut Shard) -> ShardDelta {
        let tokenizer = match &self.tokenizer {
            Some(before) if *before == shard.header.tokenizer => OfText::Same,
            _ => {
                self.tokenizer = Some(shard.header.tokenizer.clone());
                OfText::Own(shard.header.tokenizer.clone())
            }
        };
        let preprocessing = match &self.preprocessing {
            Some(before) if *before == shard.preprocessing => {
                shard.preprocessing = before.clone();
                None
            }
            _ => {
                self.preprocessing = Some(shard.preprocessing.clone());
                Some((*shard.preprocessing).clone())
            }
        };
        let mut brief = shard.clone();
        brief.header.tokenizer = None;
        ShardDelta { shard: Box::new(brief), preprocessing, tokenizer }
    }

    /// Returns the shard of a message; `None` if the message refers to a previous shard that was
    /// not received.
    pub(super) fn complete(&mut self, brief: ShardDelta) -> Option<Shard> {
        let ShardDelta { mut shard, preprocessing, tokenizer } = brief;
        if let OfText::Own(tokenizer) = tokenizer {
            self.tokenizer = Some(tokenizer);
        }
        if let Some(preprocessing) = preprocessing {
            self.preprocessing = Some(preprocessing.into());
        }
        shard.header.tokenizer = self.tokenizer.clone()?;
        shard.preprocessing = self.preprocessing.clone()?;
        Some(*shard)
    }
}
