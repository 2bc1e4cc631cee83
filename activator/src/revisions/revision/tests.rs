#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
    pin::pin,
};

use common::{
    service_routing::{NodeTopology, TopologyHints},
    wire::AppProtocol,
};
use futures::FutureExt as _;
use prometheus_client::registry::Registry;

use super::*;
use crate::{
    config::ActivatorConfig,
    metrics::ActivatorMetrics,
    revisions::route_settings::{PodTableEntry, RequestTimeouts, RevisionOwnerNames},
    slots::peer_view::PeerView,
};

/// Returns a context with the default bounds, for an activator with these peers.
pub(crate) fn new_context(peers: Peers) -> RevisionContext {
    RevisionContext {
        peers: Arc::new(peers),
        queue_bounds: ActivatorConfig::defaults().budget(1024).wait_queue,
        pod_settings: PodConnectionSettings {
            listen_backlog: 128,
            max_idle: Duration::from_secs(1),
            metrics: ActivatorMetrics::register(&mut Registry::default()),
        },
        usage_reporter: Arc::default(),
        next_pod_id: AtomicU64::new(0),
        reports: Outbox::new(),
    }
}

/// Returns a Revision in the table with one ready pod, which takes one request at a time.
fn limited_revision(context: &Arc<RevisionContext>) -> Arc<ActivatorRevision> {
    let revision = revision_with_limit(context, 1);
    let pods = PodTable::from([("uid".to_owned(), pod_entry(true))]);
    revision.set_pods(&pods, &ActivatorTopology::default());
    revision
}

/// Returns a Revision in the table without pods.
fn revision_with_limit(
    context: &Arc<RevisionContext>,
    concurrency_limit: u32,
) -> Arc<ActivatorRevision> {
    let name = NamespacedName::new("default", "hello-00001");
    let revision = Arc::new(ActivatorRevision::new(name, Arc::clone(context)));
    let timeouts = RequestTimeouts {
        total: Duration::from_secs(60),
        response_start: None,
        between_frames: None,
    };
    let owner_names = RevisionOwnerNames { service: "hello".into(), configuration: "hello".into() };
    revision.set_route_settings(Some(RevisionRouteSettings {
        concurrency_limit,
        protocol: AppProtocol::Http1,
        timeouts,
        allowed_sources: None,
        owner_names,
    }));
    revision
}

/// Returns a pod that is ready or starts.
fn pod_entry(is_ready: bool) -> PodTableEntry {
    PodTableEntry {
        // The discard port: permits are given without a dial.
        address: Some(([127, 0, 0, 1], 9).into()),
        is_ready,
        is_starting: !is_ready,
        is_early_ready: false,
        standby: None,
        name: "pod".into(),
        place: NodeTopology::default(),
        hints: TopologyHints::default(),
        ports: Box::default(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_crowd_waits_a_moment_for_pods_that_start_and_no_longer() {
    let context = Arc::new(new_context(Peers::new("a", NonZeroU16::new(9000), Vec::new())));
    let revision = revision_with_limit(&context, 0);
    let mut entries: Vec<_> = (0..200).map(|_| revision.queue_entry(None, 0)).collect();
    let mut permits: Vec<_> = entries.iter_mut().map(|it| Box::pin(it.acquire_permit())).collect();
    assert!(permits.iter_mut().all(|it| it.as_mut().now_or_never().is_none()), "there is no pod");
    let pods = |ready: [bool; 2]| {
        PodTable::from([
            ("first".to_owned(), pod_entry(ready[0])),
            ("second".to_owned(), pod_entry(ready[1])),
        ])
    };
    revision.set_pods(&pods([true, false]), &ActivatorTopology::default());
    assert_eq!((revision.waiting_count(), revision.queue_metrics().at_pods), (100, 100));
    assert!(revision.try_permit(None).is_none(), "no request overtakes the crowd");
    // Nothing else happens, so that the paused clock advances to the end of the release.
    let held = futures::future::join_all(permits).await;
    let pods: BTreeSet<_> = held.into_iter().map(|it| it.unwrap().pod.uid.clone()).collect();
    assert_eq!(pods, BTreeSet::from(["first".into()]), "the second pod has not come");
    assert!(revision.try_permit(None).is_some());
}

#[tokio::test]
async fn a_crowd_is_spread_over_pods_that_become_ready_one_after_the_other() {
    let context = Arc::new(new_context(Peers::new("a", NonZeroU16::new(9000), Vec::new())));
    let revision = revision_with_limit(&context, 0);
    let mut entries: Vec<_> = (0..800).map(|_| revision.queue_entry(None, 0)).collect();
    let mut permits: Vec<_> = entries.iter_mut().map(|it| Box::pin(it.acquire_permit())).collect();
    assert!(permits.iter_mut().all(|it| it.as_mut().now_or_never().is_none()), "there is no pod");
    for ready in 1..=8 {
        let pod = |number: u16| {
            let address = Some(([127, 0, 0, 1], number).into());
            (number.to_string(), PodTableEntry { address, ..pod_entry(number <= ready) })
        };
        let pods: PodTable = (1..=8).map(pod).collect();
        revision.set_pods(&pods, &ActivatorTopology::default());
        let shares = u64::from(ready) * 100;
        assert_eq!(revision.queue_metrics().at_pods, shares, "{ready} pods are ready");
    }
    let mut counts = BTreeMap::<_, u32>::new();
    // All are sent already. A task may not take so many in one turn.
    for permit in futures::future::join_all(permits).await {
        *counts.entry(permit.unwrap().pod.uid.clone()).or_default() += 1;
    }
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [100; 8]);
}

#[tokio::test]
async fn a_request_that_is_dispatched_while_overdue_ones_fail_gets_its_permit() {
    let context = Arc::new(new_context(Peers::new("a", NonZeroU16::new(9000), Vec::new())));
    let revision = limited_revision(&context);
    let mut entry = revision.queue_entry(None, 0);
    let mut permit = pin!(entry.acquire_permit());
    assert!(permit.as_mut().now_or_never().is_none(), "a new activator grants no slots yet");
    // The Revision was missing in the table and is back, and it has not noticed yet that slots may be granted.
    context.peers.replace_view(PeerView { own_name: "a".into(), ..PeerView::default() });
    revision.fail_waiters();
    let permit = permit.now_or_never().expect("the only slot").unwrap();
    assert_eq!(revision.queue_metrics().at_pods, 1);
    drop(permit);
    assert_eq!(revision.queue_metrics().at_pods, 0);
}

#[test]
fn the_first_client_of_a_wait_is_named_until_nothing_waits() {
    let context = Arc::new(new_context(Peers::new("a", NonZeroU16::new(9000), Vec::new())));
    let name = NamespacedName::new("default", "hello-00001");
    let revision = Arc::new(ActivatorRevision::new(name, context));
    let address = |last: u8| IpAddr::from([10, 0, 0, last]);
    let start_waiting = |last: u8| {
        let mut entry = revision.queue_entry(None, 0).with_client(address(last));
        assert!(entry.acquire_permit().now_or_never().is_none(), "there is no pod");
        entry
    };
    assert_eq!(revision.first_client(), None);
    let (first, second) = (start_waiting(1), start_waiting(2));
    assert_eq!(revision.first_client(), Some(address(1)));
    drop(first);
    assert_eq!(revision.first_client(), Some(address(1)), "the pod was asked for by it");
    drop(second);
    assert_eq!(revision.first_client(), None);
    let _third = start_waiting(3);
    assert_eq!(revision.first_client(), Some(address(3)));
}

#[tokio::test]
async fn a_permit_without_a_wait_takes_a_free_slot_and_no_other() {
    let context = Arc::new(new_context(Peers::new("a", NonZeroU16::new(9000), Vec::new())));
    let revision = limited_revision(&context);
    assert!(revision.try_permit(None).is_none(), "a new activator grants no slots yet");
    let mut entry = revision.queue_entry(None, 0);
    let mut first = pin!(entry.acquire_permit());
    assert!(first.as_mut().now_or_never().is_none());
    context.peers.replace_view(PeerView { own_name: "a".into(), ..PeerView::default() });
    revision.fail_waiters();
    let first = first.now_or_never().expect("the only slot").unwrap();
    assert!(revision.try_permit(None).is_none(), "it is in use");
    drop(first);
    let second = revision.try_permit(None).expect("the slot is free again");
    assert!(revision.try_permit(None).is_none());
    assert_eq!(revision.queue_metrics().at_pods, 1);
    drop(second);
    assert_eq!(revision.queue_metrics().at_pods, 0);
}
