//! Shell: following of the RouteTable from one replica at a time, across broken streams.

use std::{collections::BTreeSet, time::Duration};

use futures::{Stream, StreamExt as _};
use prost::bytes::Bytes;
use tokio::time::Instant;
use tonic::Status;

use super::{
    ComponentLink, LinkError, RouteBatch, StreamAttempt, random_u64,
    route_batches::{ItemEffect, RouteStreamState},
    route_codec::open_route_stream,
    stream_error,
};
use crate::{
    component::Component,
    log,
    replicas::{NextReplica, ReplicaEndpoint, ReplicaSelector},
    wire::{LogLevel, RouteChange, RouteItem, RouteKey, RouteView, raw},
};

/// Timeout of a route stream that has not sent its first `Synced`, counted from its latest item.
const TABLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Cost of the work after which the receiver lets other tasks run. A small item that is known costs 1, and takes less than
/// a microsecond.
const MAX_SLICE_COST: usize = 512;
/// Cost of an item that is decoded, as a multiple of that of a known one.
const DECODING_COST: usize = 4;
/// Number of bytes that cost as much as an item without any.
const BYTES_PER_COST: usize = 1_024;

impl ComponentLink {
    /// Follows the RouteTable. `each` gets the whole table and the keys that one batch changed.
    pub async fn watch_routes(&self, mut each: impl FnMut(&RouteView, &BTreeSet<RouteKey>)) {
        let mut view = RouteView::default();
        // A batch names each subject once, so `Synced` is added behind it, and `apply_item` acts only there.
        self.watch_batches(|RouteBatch { version, is_snapshot, changes, .. }| {
            if is_snapshot {
                view.begin_stream();
            }
            for change in changes.into_values().chain([RouteChange::Synced]) {
                if let Some(changed) = view.apply_item(RouteItem { version, change }) {
                    each(&view, &changed);
                }
            }
        })
        .await;
    }

    /// Follows the RouteTable without storing it. Subjects that a batch with `is_snapshot` omits are removed. No batch has
    /// a state that the receiver has in force already, except for what a stream that broke has sent in between.
    pub async fn watch_batches(&self, each: impl FnMut(RouteBatch)) {
        tokio::select! {
            () = self.keep_route_stream(each) => {}
            () = self.resolver.run_lookups() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    async fn keep_route_stream(&self, mut each: impl FnMut(RouteBatch)) {
        let mut selector = ReplicaSelector::default();
        let mut stream_state = RouteStreamState::default();
        let begin = Instant::now();
        loop {
            let endpoint = self.wait_for_replica(&mut selector, begin).await;
            let attempt = StreamAttempt::default();
            let ended =
                self.run_route_stream(&endpoint, &attempt, &mut stream_state, &mut each).await;
            // A stream that was open is no failed attempt, so the next one follows without a growing pause.
            let was_established = attempt.was_established();
            let wait =
                selector.record_failure(begin.elapsed(), &endpoint, was_established, random_u64());
            self.record_stream_ended(&endpoint, ended, wait);
        }
    }

    /// Waits until some replica may be tried.
    async fn wait_for_replica(
        &self,
        selector: &mut ReplicaSelector,
        begin: Instant,
    ) -> ReplicaEndpoint {
        let mut known = self.resolver.subscribe_known();
        // A new replica ends the wait: it has no failures and may be tried at once.
        loop {
            let all = known.borrow_and_update().all();
            selector.retain(&all);
            let wait = match selector.next(begin.elapsed(), &all, random_u64()) {
                NextReplica::Try(endpoint) => return endpoint,
                NextReplica::WaitUntil(until) => Some(begin + until),
                NextReplica::NoneKnown => None,
            };
            let timer = async {
                match wait {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = timer => {}
                _ = known.changed() => {}
            }
        }
    }

    /// Runs one stream to a replica, and passes each batch to `each`, until the stream ends.
    async fn run_route_stream(
        &self,
        endpoint: &ReplicaEndpoint,
        attempt: &StreamAttempt,
        stream_state: &mut RouteStreamState,
        each: &mut impl FnMut(RouteBatch),
    ) -> Result<(), LinkError> {
        let broke = |status| stream_error(endpoint, status);
        let channel = self.resolver.dial(endpoint).await?;
        let opening = open_route_stream(channel, raw::Subscriber::from(self.local_replica.clone()));
        let opened = tokio::time::timeout(TABLE_TIMEOUT, opening).await;
        let silent = |_elapsed| LinkError::TableTimeout { endpoint: endpoint.to_string() };
        let items = opened.map_err(silent)?.map_err(broke)?;
        let _up = self.record_stream_opened(endpoint, "routes");
        // Until the first `Synced`, the table of the former stream stays in force.
        stream_state.begin_stream(endpoint);
        receive_batches(endpoint, items, attempt, stream_state, |batch| {
            // Before `each`, so that streams to a new replica open while the receiver still works on the batch.
            self.apply_to_process(&batch);
            each(batch);
        })
        .await
    }

    /// Applies what a batch says of replicas and of this component's log level.
    fn apply_to_process(&self, batch: &RouteBatch) {
        let component = Component::from(self.local_replica.role);
        match batch.changes.get(&RouteKey::Settings) {
            Some(RouteChange::Settings(it)) => {
                log::set_level(component, log::level_of(component, &it.log_levels))
            }
            // Settings that a batch omits are unchanged, but those that a whole table omits have their defaults.
            None if !batch.is_snapshot => {}
            Some(_) | None => log::set_level(component, LogLevel::default()),
        }
        for (server_component, resolver) in &self.listed_resolvers {
            match batch.changes.get(&RouteKey::Replicas(*server_component)) {
                Some(RouteChange::Replicas(it)) => {
                    resolver.set_listed(it.members.iter().map(|it| it.address));
                }
                Some(_) => resolver.set_listed([]),
                None if batch.is_snapshot => resolver.set_listed([]),
                None => {}
            }
        }
    }
}

/// Receives the items of one stream, and passes each batch to `each`, until the stream ends.
pub(super) async fn receive_batches(
    endpoint: &ReplicaEndpoint,
    mut items: impl Stream<Item = Result<Bytes, Status>> + Unpin,
    attempt: &StreamAttempt,
    stream_state: &mut RouteStreamState,
    mut each: impl FnMut(RouteBatch),
) -> Result<(), LinkError> {
    let broke = |status| stream_error(endpoint, status);
    let mut slice = WorkSlice::default();
    loop {
        // Only the first table has a timeout: later silence means no change, and keepalive pings find dead peers.
        let table_deadline =
            stream_state.next_is_snapshot().then(|| Instant::now() + TABLE_TIMEOUT);
        let item = tokio::select! {
            // In this order, an item that is there sets no timer for the next one.
            biased;
            () = sleep_until(stream_state.held_until()) => {
                each(stream_state.release_held());
                continue;
            }
            item = items.next() => item.transpose().map_err(broke)?,
            () = sleep_until(table_deadline) => {
                return Err(LinkError::TableTimeout { endpoint: endpoint.to_string() });
            }
        };
        let Some(item) = item else { return Ok(()) };
        let effect = stream_state.apply_encoded(&item);
        let effect = effect.map_err(|error| broke(Status::internal(error.to_string())))?;
        let is_known = matches!(effect, ItemEffect::Known);
        match effect {
            ItemEffect::Known | ItemEffect::Pending => {}
            ItemEffect::Ended(batch) => {
                // Only the first whole table proves the replica: one that sends none must not count as established.
                attempt.record_open();
                each(batch);
            }
        }
        let cost = 1 + item.len() / BYTES_PER_COST;
        slice.add(if is_known { cost } else { DECODING_COST * cost }).await;
    }
}

/// Work of a task since it has let other tasks run.
#[derive(Debug, Default)]
struct WorkSlice {
    cost: usize,
}

impl WorkSlice {
    /// Adds work. Once there is enough of it, other tasks run, for example those that serve requests.
    async fn add(&mut self, cost: usize) {
        self.cost += cost;
        if self.cost >= MAX_SLICE_COST {
            self.cost = 0;
            // Where all items are there already, the loop waits for nothing else.
            tokio::task::yield_now().await;
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
