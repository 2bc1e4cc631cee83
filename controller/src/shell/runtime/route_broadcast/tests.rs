use std::{cell::Cell, net::Ipv4Addr};

use common::{
    fixtures,
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{
        AllowedSources, CertificateEntry, CertificateMaterial, NamespacedName, PrivateKeyBytes,
        RevisionEntry,
    },
};
use serde_json::json;

use super::*;
use crate::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::{cluster_state::ClusterState, object::ResourceKind},
    shell::runtime::route_subscription::{RouteTableSubscription, RouteTableUpdate},
};

/// Zones of nodes, by name.
type Zones = BTreeMap<String, String>;

/// Makes a runtime whose RouteTable has nothing but the zones of nodes.
fn new_runtime() -> Arc<ControllerRuntime> {
    let (node_spec, _) = watch::channel(LocalNodeSpec::default());
    let machine = ControllerStateMachine::new(ClusterState::default(), Outbox::new());
    Arc::new(ControllerRuntime::new(machine, node_spec))
}

/// Sets the zone of a node; `None` removes the node.
fn set_zone(runtime: &ControllerRuntime, node: &str, zone: Option<&str>) {
    let object = |zone: &str| {
        let labels = json!({"topology.kubernetes.io/zone": zone});
        Box::new(json!({"metadata": {"name": node, "labels": labels}}))
    };
    runtime.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Node,
        name: NamespacedName::new("", node),
        object: zone.map(object),
    });
}

/// Starts a broadcast, which runs until the end of the test.
fn run_broadcast(
    runtime: &Arc<ControllerRuntime>,
    delay: Duration,
    max_log_size: usize,
) -> Arc<RouteBroadcast> {
    let broadcast =
        Arc::new(RouteBroadcast::with_log_size(Arc::clone(runtime), delay, max_log_size));
    let running = Arc::clone(&broadcast);
    tokio::spawn(async move { running.run().await });
    broadcast
}

/// Stream with the table that its updates give.
struct TableStream {
    subscription: RouteTableSubscription,
    zones: Zones,
    version: u64,
}

impl TableStream {
    fn new(broadcast: &Arc<RouteBroadcast>) -> Self {
        let subscription = RouteTableSubscription::new(Arc::clone(broadcast));
        Self { subscription, zones: Zones::new(), version: 0 }
    }

    /// Waits for the next update and applies it.
    async fn next(&mut self) -> RouteTableUpdate {
        let update = tokio::time::timeout(Duration::from_secs(30), self.subscription.next()).await;
        let update = update.expect("an update in time");
        assert!(!update.batches().is_empty());
        for batch in update.batches() {
            assert!(self.version < batch.version(), "versions only grow");
            self.version = batch.version();
            for (key, change) in &batch.routes().changes {
                let RouteKey::Node(name) = key else { continue };
                match change {
                    Some(RouteChange::Node(it)) => {
                        self.zones.insert(name.clone(), it.zone.to_string());
                    }
                    _ => drop(self.zones.remove(name)),
                }
            }
        }
        update
    }
}

#[test]
fn the_allowed_sources_of_a_revision_count_for_the_size_of_the_log() {
    let name = NamespacedName::new("default", "hello-00001");
    let revision = |source_count: u32| {
        let addresses = (0..source_count).map(|at| Ipv4Addr::from(at).into()).collect();
        let sources = AllowedSources { addresses, ..AllowedSources::default() };
        let allowed_sources = Some(Arc::new(sources));
        let revision = fixtures::revision(&name, "hello");
        RouteChange::Revision(RevisionEntry { allowed_sources, ..revision })
    };
    let size = |change: Option<RouteChange>| {
        let changes = vec![(RouteKey::Revision(name.clone()), change)];
        SharedRouteBatch::new(0, RouteMessageBatch { version: 1, changes }).log_size()
    };
    let large = 1 + 10_000 / SOURCES_PER_LOGGED_CHANGE;
    assert_eq!([None, Some(revision(0)), Some(revision(10_000))].map(size), [1, 1, large]);
}

/// Returns a batch with one certificate, whose chain has this number of bytes.
fn certificate_batch(chain_bytes: usize) -> SharedRouteBatch {
    let name = NamespacedName::new("default", "own");
    let key = PrivateKeyBytes::new(b"the key".to_vec());
    let material = CertificateMaterial { chain: vec![vec![0; chain_bytes]], key };
    let entry = CertificateEntry { name: name.clone(), material: Some(Arc::new(material)) };
    let changes = vec![(RouteKey::Certificate(name), Some(RouteChange::Certificate(entry)))];
    SharedRouteBatch::new(0, RouteMessageBatch { version: 1, changes })
}

#[test]
fn the_bytes_of_a_certificate_count_for_the_size_of_the_log() {
    assert_eq!([0, 1_023, 65_536].map(|it| certificate_batch(it).log_size()), [1, 1, 65]);
}

#[test]
fn no_debug_output_of_a_batch_has_encoded_bytes() {
    let batch = certificate_batch(1);
    let encoded = batch.encoded_for(ClientComponent::Activator, |_| {
        EncodedPieces::from([Bytes::from_static(b"the key")])
    });
    assert!(format!("{encoded:?}").contains("the key"), "the bytes are readable");
    let shown = format!("{batch:?}");
    assert!(shown.contains("default") && !shown.contains("the key"), "{shown}");
}

#[tokio::test]
async fn all_streams_share_each_batch_and_its_bytes() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, MAX_LOG_SIZE);
    let mut streams: Vec<TableStream> = (0..3).map(|_| TableStream::new(&broadcast)).collect();
    let mut updates = Vec::new();
    for stream in &mut streams {
        stream.next().await;
    }
    set_zone(&runtime, "n1", Some("a"));
    for stream in &mut streams {
        updates.push(stream.next().await);
    }
    let encode_count = Cell::new(0);
    let encode = |_: &RouteMessageBatch| {
        encode_count.set(encode_count.get() + 1);
        EncodedPieces::from([Bytes::from_static(b"items")])
    };
    for update in &updates {
        let [batch] = update.batches() else { panic!("one change is one batch") };
        assert!(Arc::ptr_eq(batch, &updates[0].batches()[0]));
        assert!(matches!(batch.node_change("n1"), Some(RouteChange::Node(_))));
        batch.encoded_for(ClientComponent::Agent, encode);
        batch.encoded_for(ClientComponent::Autoscaler, encode);
    }
    assert_eq!(encode_count.get(), 2, "once for each role");
}

#[tokio::test]
async fn slow_streams_hold_up_no_other_and_share_one_batch_when_they_continue() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, 2);
    let [mut fast, mut slow, mut idle] = [(); 3].map(|()| TableStream::new(&broadcast));
    for stream in [&mut fast, &mut slow, &mut idle] {
        stream.next().await;
    }
    for at in 0..10 {
        set_zone(&runtime, &format!("n{}", at % 3), Some(&format!("z{at}")));
        fast.next().await;
    }
    set_zone(&runtime, "n0", None);
    fast.next().await;
    let (one, other) = (slow.next().await, idle.next().await);
    assert_eq!((one.batches().len(), other.batches().len()), (1, 1));
    assert!(Arc::ptr_eq(&one.batches()[0], &other.batches()[0]), "made for the first of them");
    let present = Zones::from([("n1".into(), "z7".into()), ("n2".into(), "z8".into())]);
    assert_eq!([&fast.zones, &slow.zones, &idle.zones], [&present; 3]);
    // From here on they follow the log again.
    set_zone(&runtime, "n9", Some("z"));
    let (one, other) = (fast.next().await, slow.next().await);
    assert!(Arc::ptr_eq(&one.batches()[0], &other.batches()[0]));
    assert_eq!(slow.zones, fast.zones);
}

#[tokio::test]
async fn a_removal_reaches_a_stream_that_is_behind_the_log() {
    let runtime = new_runtime();
    set_zone(&runtime, "n1", Some("a"));
    let broadcast = run_broadcast(&runtime, Duration::ZERO, 1);
    let (mut fast, mut slow) = (TableStream::new(&broadcast), TableStream::new(&broadcast));
    fast.next().await;
    slow.next().await;
    for (node, zone) in [("n1", None), ("n2", Some("a")), ("n3", Some("a"))] {
        set_zone(&runtime, node, zone);
        fast.next().await;
    }
    assert!(slow.zones.contains_key("n1"));
    let update = slow.next().await;
    let [batch] = update.batches() else { panic!("it is behind the log") };
    let [removed, added] = ["n1", "n2"].map(|node| batch.node_change(node));
    assert!(matches!(removed, Some(RouteChange::Removed(_))), "the agent of the node gets it");
    assert!(matches!(added, Some(RouteChange::Node(_))));
    assert_eq!(slow.zones.keys().collect::<Vec<_>>(), ["n2", "n3"]);
}

#[tokio::test]
async fn streams_may_begin_late_and_again_after_all_others_have_ended() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, MAX_LOG_SIZE);
    let mut early = TableStream::new(&broadcast);
    early.next().await;
    set_zone(&runtime, "n1", Some("a"));
    early.next().await;
    let mut late = TableStream::new(&broadcast);
    late.next().await;
    assert_eq!(late.zones, early.zones);
    drop((early, late));
    for (zone, begins_later) in [("b", false), ("c", true)] {
        let version = runtime.routes.version();
        set_zone(&runtime, "n2", Some(zone));
        while begins_later && *broadcast.version.borrow() <= version {
            tokio::task::yield_now().await;
        }
        if begins_later {
            assert!(broadcast.lock_log().since(version).is_none(), "no stream needed a batch");
        }
        let mut again = TableStream::new(&broadcast);
        again.next().await;
        set_zone(&runtime, "n1", Some(zone));
        again.next().await;
        let present = Zones::from(["n1", "n2"].map(|node| (node.into(), zone.into())));
        assert_eq!(again.zones, present);
    }
}

#[tokio::test]
async fn a_stream_gets_no_change_from_before_its_snapshot() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, MAX_LOG_SIZE);
    let mut early = TableStream::new(&broadcast);
    early.next().await;
    // Until a stream waits, the broadcast does not run: the second stream begins within the first batch.
    set_zone(&runtime, "n1", Some("a"));
    let mut late = TableStream::new(&broadcast);
    late.next().await;
    assert!(late.zones.contains_key("n1"));
    set_zone(&runtime, "n2", Some("a"));
    let update = late.next().await;
    let [batch] = update.batches() else { panic!("one change is one batch") };
    let keys: Vec<&RouteKey> = batch.routes().changes.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [&RouteKey::Node("n2".into())]);
    let update = early.next().await;
    assert_eq!(update.batches()[0].routes().changes.len(), 2);
    // From here on both follow the log.
    set_zone(&runtime, "n3", Some("a"));
    let (one, other) = (early.next().await, late.next().await);
    assert!(Arc::ptr_eq(&one.batches()[0], &other.batches()[0]));
    assert_eq!(early.zones, late.zones);
}

#[tokio::test(start_paused = true)]
async fn batches_that_all_streams_have_are_dropped_without_another_change() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, MAX_LOG_SIZE);
    let (mut fast, mut slow) = (TableStream::new(&broadcast), TableStream::new(&broadcast));
    fast.next().await;
    slow.next().await;
    let version = runtime.routes.version();
    set_zone(&runtime, "n1", Some("a"));
    fast.next().await;
    let logged = || broadcast.lock_log().since(version).map(|batches| batches.len());
    tokio::time::sleep(2 * LOG_CHECK_INTERVAL).await;
    assert_eq!(logged(), Some(1), "a slow stream lacks it");
    slow.next().await;
    tokio::time::sleep(2 * LOG_CHECK_INTERVAL).await;
    assert_eq!(logged(), None);
    set_zone(&runtime, "n2", Some("a"));
    let (one, other) = (fast.next().await, slow.next().await);
    assert!(Arc::ptr_eq(&one.batches()[0], &other.batches()[0]));
    assert_eq!((fast.zones.len(), slow.zones), (2, fast.zones));
}

#[tokio::test(start_paused = true)]
async fn streams_of_a_delayed_broadcast_get_the_same_changes_later() {
    let runtime = new_runtime();
    let prompt = run_broadcast(&runtime, Duration::ZERO, MAX_LOG_SIZE);
    let delayed = run_broadcast(&runtime, Duration::from_millis(1), MAX_LOG_SIZE);
    let (mut prompt, mut delayed) = (TableStream::new(&prompt), TableStream::new(&delayed));
    prompt.next().await;
    delayed.next().await;
    for zone in ["a", "b"] {
        set_zone(&runtime, "n1", Some(zone));
        tokio::select! {
            biased;
            _ = delayed.next() => panic!("the other stream comes first"),
            _ = prompt.next() => {}
        }
        // Of the changes in the meantime there is one batch. The future that was dropped above has lost nothing.
        set_zone(&runtime, "n2", Some(zone));
        assert_eq!(delayed.next().await.batches().len(), 1);
        prompt.next().await;
        assert_eq!(delayed.zones, prompt.zones);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_streams_follow_a_table_that_changes_meanwhile() {
    let runtime = new_runtime();
    let broadcast = run_broadcast(&runtime, Duration::ZERO, 8);
    let follow = |at: usize| {
        let broadcast = Arc::clone(&broadcast);
        async move {
            let mut stream = TableStream::new(&broadcast);
            while !stream.zones.contains_key("last") {
                stream.next().await;
                // Every other stream is slow, and some of these begin again.
                for _ in 0..at % 2 * 20 {
                    tokio::task::yield_now().await;
                }
                if at % 4 == 3 && !stream.zones.contains_key("last") {
                    stream = TableStream::new(&broadcast);
                }
            }
            stream.zones
        }
    };
    let streams: Vec<_> = (0..20).map(|at| tokio::spawn(follow(at))).collect();
    let mut present = Zones::new();
    for at in 0..1_000 {
        let (node, zone) = (format!("n{}", at % 7), format!("z{at}"));
        let zone = (at % 3 > 0).then_some(zone);
        set_zone(&runtime, &node, zone.as_deref());
        match zone {
            Some(zone) => drop(present.insert(node, zone)),
            None => drop(present.remove(&node)),
        }
        tokio::task::yield_now().await;
    }
    set_zone(&runtime, "last", Some("z"));
    present.insert("last".into(), "z".into());
    for stream in streams {
        assert_eq!(stream.await.expect("no panic"), present);
    }
}
