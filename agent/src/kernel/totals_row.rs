//! Pure: totals of a pod or a Revision, as words of a kernel map.

use datapath::abi;

/// Number of words of a [`TotalsRow`].
pub(crate) const WORDS: usize = abi::RESPONSE_WORDS + 3;

/// Running totals of one pod, or of a Revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TotalsRow {
    /// Responses by status and duration, and other ends of requests.
    pub(crate) responses: abi::ResponseCounters,
    /// Number of requests that have begun.
    pub(crate) started: u64,
    /// Connections whose message boundaries were lost.
    pub(crate) desync: u64,
    /// Responses that no request had asked for.
    pub(crate) stray: u64,
}

impl TotalsRow {
    /// Returns the totals as words, in the form in which the map stores them.
    pub(crate) fn words(self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let (responses, rest) = words.split_at_mut(abi::RESPONSE_WORDS);
        responses.copy_from_slice(&self.responses.words());
        rest.copy_from_slice(&[self.started, self.desync, self.stray]);
        words
    }

    /// Returns the totals from their words.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let mut responses = [0; abi::RESPONSE_WORDS];
        responses.copy_from_slice(&words[..abi::RESPONSE_WORDS]);
        let rest = |at| words[abi::RESPONSE_WORDS + at];
        Self {
            responses: abi::ResponseCounters::from_words(responses),
            started: rest(0),
            desync: rest(1),
            stray: rest(2),
        }
    }

    /// Combines each word of two rows by `each`.
    pub(crate) fn zip_words(self, other: Self, each: impl Fn(u64, u64) -> u64) -> Self {
        let (mut words, other) = (self.words(), other.words());
        words.iter_mut().zip(other).for_each(|(word, other)| *word = each(*word, other));
        Self::from_words(words)
    }

    /// Returns the sums of the words of two rows.
    pub(crate) fn plus(self, other: Self) -> Self {
        self.zip_words(other, u64::wrapping_add)
    }
}
