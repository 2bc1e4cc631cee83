//! Pure: HTTP/2: generated frames, and their reading by other implementations.

pub mod client_server;
mod client_stream;
pub mod frame_script;
pub mod frames;
pub mod reference;
pub mod scripted;
pub mod server;
mod simulated_server;

use self::reference::{Http2Reference, ReferenceEvent};
use crate::{
    ebpf_model::{EbpfModel, ModelEvent},
    totals::{CROWD, ConformanceTotals},
};

/// Numbers of requests that have begun, were aborted and got a response.
type EventCounts = [usize; 3];

/// Incremental comparison of the model's events with the reference; each event is read once.
#[derive(Clone, Debug, Default)]
pub struct EventComparison {
    /// Numbers of events of the model and of the reference that the counts below include.
    read: [usize; 2],
    model_counts: EventCounts,
    reference_counts: EventCounts,
    /// True once bytes have arrived behind missing ones.
    pub has_had_gap: bool,
    is_crowded: bool,
    /// True once model and reference differed in a way that a request without a place in the table of streams explains:
    /// its end was taken for that of an earlier request, or a GOAWAY did not end it. From then on nothing is compared.
    is_ambiguous: bool,
}

impl EventComparison {
    /// Compares the model with the reference, if both have read the same bytes; the error describes the difference.
    ///
    /// Behind a gap in a payload the model continues to read, and the reference does not. So after a gap the two may
    /// differ: the same request was aborted by its client for one and got a response for the other, or began just before
    /// the server's GOAWAY.
    pub fn compare(&mut self, model: &EbpfModel, reference: &Http2Reference) -> Result<(), String> {
        for event in &model.events()[self.read[0]..] {
            match event {
                ModelEvent::Started => self.model_counts[0] += 1,
                ModelEvent::Aborted => self.model_counts[1] += 1,
                ModelEvent::Responded(..) => self.model_counts[2] += 1,
                ModelEvent::Http2 => {}
                _ => return Err(format!("{event:?} on a connection of HTTP/2")),
            }
        }
        for event in &reference.events[self.read[1]..] {
            match event {
                ReferenceEvent::Started(_) => self.reference_counts[0] += 1,
                ReferenceEvent::Aborted(_) => self.reference_counts[1] += 1,
                ReferenceEvent::Responded(_) => self.reference_counts[2] += 1,
            }
        }
        self.read = [model.events().len(), reference.events.len()];
        self.is_crowded |= model.in_flight() > CROWD;
        let [started, aborted, responded] = self.model_counts;
        let [reference_started, reference_aborted, reference_responded] = self.reference_counts;
        let is_same = match self.has_had_gap {
            false => self.model_counts == self.reference_counts,
            true if reference.last_processed.is_some() => true,
            true => {
                started == reference_started
                    && aborted + responded == reference_aborted + reference_responded
            }
        };
        let in_flight = model.in_flight() as usize;
        let may_differ = model.has_untracked()
            && (reference.redundant_ends > 0 || reference.last_processed.is_some());
        let is_same_now = in_flight == reference.in_flight.len();
        self.is_ambiguous |= may_differ && !(is_same && is_same_now);
        if self.is_ambiguous {
            return Ok(());
        }
        if !is_same {
            return Err(format!(
                "started, aborted, responded: {:?}, not {:?}",
                self.model_counts, self.reference_counts
            ));
        }
        match is_same_now {
            true => Ok(()),
            false => Err(format!("{in_flight} in flight, not {}", reference.in_flight.len())),
        }
    }

    /// Returns true if requests have ended in the same ways in the model and in the reference.
    pub fn is_exact(&self) -> bool {
        self.model_counts == self.reference_counts
    }

    /// Totals of this connection, with the number of requests that were given to the server.
    pub fn totals(&self, requests: u64, is_refused: bool) -> ConformanceTotals {
        ConformanceTotals {
            requests,
            refused: u64::from(is_refused),
            not_compared: u64::from(self.is_ambiguous),
            crowded: u64::from(self.is_crowded),
        }
    }

    /// Number of requests that got a response according to the reference.
    pub fn responded(&self) -> u64 {
        self.reference_counts[2] as u64
    }
}
