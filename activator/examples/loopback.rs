//! Shell: an activator on one thread before a pod of the user's choice, for measurements without the other components.
//!
//! `cargo run --release -p activator --example loopback -- 20000 127.0.0.1:9000 [CHECK_DELAY_MS]` serves port 20000
//! with the pod at 127.0.0.1:9000. The pod becomes ready AFTER_MS milliseconds after the start (default 0).

use std::{net::SocketAddr, num::NonZeroU16, time::Duration};

use activator::{ActivatorConfig, ActivatorInstance};
use anyhow::Context as _;
use common::{
    link::RouteBatch,
    wire::{
        AppProtocol, ConnectionPath, NamespacedName, PodEntry, ReadinessProbe, RevisionEntry,
        RouteChange, RouteTable, RouteTarget, RoutingPhase, ServiceEntry,
    },
};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let mut next = |what: &str| args.next().with_context(|| format!("argument {what} is missing"));
    let port: NonZeroU16 = next("PORT")?.parse().context("PORT must be 1 to 65535")?;
    let pod: SocketAddr = next("POD")?.parse().context("POD must be address:port")?;
    let after = next("AFTER_MS").map_or(Ok(0), |text| text.parse())?;
    let mut config = ActivatorConfig::defaults();
    config.listen = vec![[127, 0, 0, 1].into()];
    // Bounds that no measurement reaches: the result must not depend on them.
    config.max_waiting = 100_000;
    config.max_waiting_bytes = 1 << 30;
    let activator =
        ActivatorInstance::new(&config, &mut Registry::default(), &CancellationToken::new());
    let apply = |states: Vec<RouteChange>| {
        let states = states.into_iter().filter_map(|state| Some((state.key()?, state)));
        let batch = RouteBatch { changes: states.collect(), ..RouteBatch::default() };
        activator.gateway.routes.apply(batch);
    };
    apply(table(port).all_states().collect());
    activator.ports.apply();
    tokio::time::sleep(Duration::from_millis(after)).await;
    apply(vec![RouteChange::Pod(ready(pod)?.into())]);
    std::future::pending::<()>().await;
    Ok(())
}

fn revision() -> NamespacedName {
    NamespacedName::new("default", "hello-1")
}

fn table(port: NonZeroU16) -> RouteTable {
    let mut table = RouteTable::default();
    let service = ServiceEntry {
        name: NamespacedName::new("default", "hello"),
        addresses: vec![],
        port,
        activator_port: port,
        targets: vec![RouteTarget { revision: revision(), percent: 100 }],
        connection_path: ConnectionPath::Activator,
        hosts: vec![],
        gateway_rules: None,
    };
    table.services.insert(service.name.clone(), service);
    let served = RevisionEntry {
        name: revision(),
        service: "hello".into(),
        configuration: "hello".into(),
        container_concurrency: 0,
        timeout: Duration::from_secs(300),
        response_start_timeout: None,
        idle_timeout: None,
        protocol: AppProtocol::Http1,
        policy: None,
        reachable: true,
        initial_scale_reached: true,
        allowed_sources: None,
    };
    table.revisions.insert(served.name.clone(), served);
    table
}

fn ready(address: SocketAddr) -> anyhow::Result<PodEntry> {
    Ok(PodEntry {
        uid: "pod".to_owned(),
        name: "pod".to_owned(),
        revision: revision(),
        node: String::new(),
        zone: String::new(),
        phase: RoutingPhase::Ready,
        address: Some(address),
        other_family_address: None,
        kubelet_ready: false,
        port: NonZeroU16::new(address.port()).context("POD needs a port")?,
        probe: ReadinessProbe::listener_probe(),
    })
}
