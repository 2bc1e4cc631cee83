//! Items of RouteTable streams: those that are decoded, and the batches that they make.

use std::{future::poll_fn, pin::pin};

use proptest::prelude::*;
use prost::{Message as _, bytes::Bytes};

use super::*;
use crate::{
    link::{
        route_batches::{ItemEffect, RouteStreamState},
        route_watch::receive_batches,
    },
    wire::RouteItem,
};

fn replica() -> ReplicaEndpoint {
    ReplicaEndpoint::Tcp { address: ([10, 0, 0, 1], 80).into(), tls: false }
}

/// State of a subject, which is an activator on a node with this number.
fn state(subject: u8, node: u8) -> RouteChange {
    let entry = fixtures::activator(&format!("a{subject}"), Vec::new());
    RouteChange::Activator(ActivatorEntry { node: format!("n{node}"), ..entry })
}

fn key(subject: u8) -> RouteKey {
    RouteKey::Activator(format!("a{subject}"))
}

fn removal(subject: u8) -> RouteChange {
    RouteChange::Removed(key(subject))
}

/// Sender of a table, and the receiver of its streams.
#[derive(Default)]
struct PlayedStreams {
    /// Node of each subject at the sender.
    sent: BTreeMap<u8, u8>,
    version: u64,
    receiver: RouteStreamState,
    /// Number of items that the receiver has decoded.
    decoded: usize,
    /// Newest batch that the receiver has passed on.
    newest: RouteBatch,
    /// Table in force.
    view: RouteView,
}

impl PlayedStreams {
    /// Returns a sender of so many subjects, which has no stream yet.
    fn with_subjects(count: u8) -> Self {
        Self { sent: (0..count).map(|subject| (subject, 1)).collect(), ..Self::default() }
    }

    /// Sends one item, with a version of its own.
    fn send(&mut self, change: RouteChange) {
        self.version += 1;
        let item = raw::RouteItem::from(RouteItem { version: self.version, change });
        match self.receiver.apply_encoded(&item.encode_to_vec()).expect("a whole item") {
            ItemEffect::Known => {}
            ItemEffect::Pending => self.decoded += 1,
            ItemEffect::Ended(batch) => self.apply(batch),
        }
    }

    fn apply(&mut self, batch: RouteBatch) {
        self.newest = batch.clone();
        if batch.is_snapshot {
            self.view.begin_stream();
        }
        for change in batch.changes.into_values().chain([RouteChange::Synced]) {
            self.view.apply_item(RouteItem { version: batch.version, change });
        }
    }

    /// Sets or removes a subject, within a batch.
    fn change(&mut self, subject: u8, node: Option<u8>) {
        match node {
            Some(node) => {
                self.sent.insert(subject, node);
                self.send(state(subject, node));
            }
            None => {
                self.sent.remove(&subject);
                self.send(removal(subject));
            }
        }
    }

    /// Begins a stream, which breaks after so many items.
    fn break_table(&mut self, items: usize) {
        self.receiver.begin_stream(&replica());
        for (subject, node) in self.sent.clone().into_iter().take(items) {
            self.send(state(subject, node));
        }
    }

    /// Begins a stream, and sends the whole table.
    fn send_table(&mut self) {
        self.break_table(usize::MAX);
        self.send(RouteChange::Synced);
    }

    /// Table that the sender has.
    fn sent_activators(&self) -> BTreeMap<String, ActivatorEntry> {
        let states = self.sent.iter().map(|(subject, node)| state(*subject, *node));
        let entries = states.filter_map(|change| match change {
            RouteChange::Activator(entry) => Some((entry.name.clone(), entry)),
            _ => None,
        });
        entries.collect()
    }
}

#[test]
fn a_table_that_comes_again_is_not_decoded() {
    let mut streams = PlayedStreams::with_subjects(100);
    streams.send_table();
    assert_eq!((streams.decoded, streams.newest.changes.len()), (100, 100));
    assert!(streams.newest.is_snapshot && streams.newest.begins_stream);
    for _ in 0..3 {
        streams.send_table();
        let version = streams.version;
        let unchanged = RouteBatch { version, begins_stream: true, ..RouteBatch::default() };
        assert_eq!((streams.decoded, &streams.newest), (100, &unchanged));
    }
}

#[test]
fn a_table_that_comes_again_is_passed_on_as_its_differences() {
    let mut streams = PlayedStreams::with_subjects(100);
    streams.send_table();
    streams.sent.remove(&7);
    streams.sent.extend([(8, 2), (100, 1)]);
    streams.send_table();
    let changes = [(key(7), removal(7)), (key(8), state(8, 2)), (key(100), state(100, 1))];
    assert_eq!(streams.newest.changes, changes.into());
    assert_eq!((streams.decoded, streams.newest.is_snapshot), (102, false));
    // The removal is over: nothing is left of the subject.
    streams.send_table();
    assert_eq!(streams.newest.changes, BTreeMap::new());
}

#[test]
fn an_item_that_is_repeated_within_a_batch_is_not_decoded_again() {
    let mut streams = PlayedStreams::default();
    streams.send_table();
    [1, 1, 2, 1].into_iter().for_each(|node| streams.change(0, Some(node)));
    streams.send(RouteChange::Synced);
    assert_eq!(streams.decoded, 3, "the newest one alone is known");
    assert_eq!(streams.newest.changes, [(key(0), state(0, 1))].into());
    // A role that gets nothing of a subject gets its removal with each change.
    streams.change(1, None);
    streams.send(RouteChange::Synced);
    assert_eq!(streams.newest.changes, BTreeMap::new());
}

/// Receives items that are there already. Returns how often other tasks could run meanwhile.
async fn count_turns(receiver: &mut RouteStreamState, items: &[Bytes]) -> usize {
    let (from, attempt) = (replica(), StreamAttempt::default());
    receiver.begin_stream(&from);
    let items = stream::iter(items.iter().cloned().map(Ok));
    let mut receiving = pin!(receive_batches(&from, items, &attempt, receiver, drop));
    let mut turns = 0;
    let ended = poll_fn(|context| {
        let polled = receiving.as_mut().poll(context);
        turns += usize::from(polled.is_pending());
        polled
    });
    ended.await.expect("the stream ends in order");
    turns
}

#[tokio::test]
async fn other_tasks_run_while_a_table_is_received() {
    let states = (0..10_000).map(|number| {
        RouteChange::Activator(fixtures::activator(&format!("a{number}"), Vec::new()))
    });
    let encoded = states.chain([RouteChange::Synced]).map(|change| {
        Bytes::from(raw::RouteItem::from(RouteItem { version: 1, change }).encode_to_vec())
    });
    let (items, mut receiver) = (encoded.collect::<Vec<_>>(), RouteStreamState::default());
    let first = count_turns(&mut receiver, &items).await;
    let again = count_turns(&mut receiver, &items).await;
    assert!(again >= 10, "{again} turns");
    assert!(first > 2 * again, "to decode takes longer: {first} and {again} turns");
}

/// Step of a sender.
#[derive(Clone, Debug)]
enum StreamStep {
    Change(u8, Option<u8>),
    Synced,
    /// Streams that break after so many items of their tables, and then one that does not.
    Reopen(Vec<usize>),
}

fn stream_step() -> impl Strategy<Value = StreamStep> {
    let change = (0..6u8, proptest::option::of(0..3u8));
    prop_oneof![
        6 => change.prop_map(|(subject, node)| StreamStep::Change(subject, node)),
        2 => Just(StreamStep::Synced),
        2 => proptest::collection::vec(0..8usize, 0..3).prop_map(StreamStep::Reopen),
    ]
}

proptest! {
    /// Wherever streams break, each batch puts exactly the sender's table in force.
    #[test]
    fn the_table_in_force_is_that_of_the_sender(
        steps in proptest::collection::vec(stream_step(), 1..40),
    ) {
        let mut streams = PlayedStreams::default();
        streams.send_table();
        // True while the receiver has got nothing that was not passed on.
        let mut is_in_force = true;
        for step in steps {
            match step {
                StreamStep::Change(subject, node) => {
                    streams.change(subject, node);
                    is_in_force = false;
                    continue;
                }
                StreamStep::Synced => streams.send(RouteChange::Synced),
                StreamStep::Reopen(broken) => {
                    broken.into_iter().for_each(|items| streams.break_table(items));
                    streams.send_table();
                    prop_assert!(streams.newest.begins_stream);
                    prop_assert!(!is_in_force || streams.newest.changes.is_empty());
                }
            }
            is_in_force = true;
            let sent = streams.sent_activators();
            prop_assert_eq!(&streams.view.table.activators, &sent);
        }
    }
}
