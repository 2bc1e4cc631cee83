//! Shell: keeps the ranges of ClusterIPs unreachable in a cluster without kube-proxy, unless a connect is redirected.

use std::{collections::BTreeSet, io, time::Duration};

use common::{link::error_chain, once_signal::OnceSignal};
use futures::{
    StreamExt as _,
    stream::{self, BoxStream},
};
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::{
    Api, Client,
    runtime::watcher::{Config, Event, Result as WatchResult},
};
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use watches::{OutageChange, WatchOutage, watch_streamed};

use super::service_ranges::{ServiceRangeChange, ServiceRanges, translated_connections};
use crate::{
    config::{AgentConfig, parse_service_cidr},
    metrics::NotReadyReasons,
    net::{
        sockdiag::SockDiag,
        unreachable_routes::{UnreachableRouteChanges, set_unreachable, unreachable_ranges},
    },
};

/// Period in which routes that are lost are added again, as after a restart of the node's network.
const ROUTE_PERIOD: Duration = Duration::from_secs(10);
/// Longest pause before a broken watch is begun again.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Subject of the not-ready reasons.
const SUBJECT: &str = "service-cidr";

/// Keeps the routes until `shutdown`; afterwards they stay, as the maps do. If kube-proxy serves the cluster, routes of
/// an earlier installation are removed.
pub(crate) async fn keep_routes(
    config: AgentConfig,
    client: Option<Client>,
    programs_in_force: OnceSignal,
    not_ready: NotReadyReasons,
    shutdown: CancellationToken,
) {
    let without_kube_proxy = config.without_kube_proxy;
    let ranges = ServiceRanges::new(config.service_cidr);
    let keep = async {
        match without_kube_proxy {
            true => follow_ranges(ranges, client, programs_in_force, not_ready).await,
            false => remove_routes(not_ready).await,
        }
    };
    tokio::select! {
        () = keep => {}
        () = shutdown.cancelled() => {}
    }
}

/// Removes the routes of an earlier installation, until none is left: one that stays would end connects that kube-proxy
/// serves.
async fn remove_routes(not_ready: NotReadyReasons) {
    loop {
        let failure = change_routes(BTreeSet::new()).await.err();
        let is_done = failure.is_none();
        not_ready.set(SUBJECT, failure);
        if is_done {
            return;
        }
        sleep(ROUTE_PERIOD).await;
    }
}

/// Keeps the routes of all ranges up to date, once the programs are in force. It never ends.
async fn follow_ranges(
    mut ranges: ServiceRanges,
    client: Option<Client>,
    programs_in_force: OnceSignal,
    not_ready: NotReadyReasons,
) {
    // Before that, connects may still need another proxy's rules, as while a cluster moves from kube-proxy.
    programs_in_force.wait().await;
    let mut events: BoxStream<'static, WatchResult<Event<ServiceCIDR>>> = match client {
        Some(client) if ranges.needs_objects() => {
            watch_streamed(Api::all(client), Config::default(), MAX_PAUSE).boxed()
        }
        _ => stream::pending().boxed(),
    };
    let mut outage = WatchOutage::default();
    loop {
        let failure = match ranges.ranges() {
            Some(ranges) => change_routes(ranges).await.err(),
            None => Some(
                "the ranges of ClusterIPs are not known: no ServiceCIDR objects were read, \
                 and --service-cidr names none"
                    .to_owned(),
            ),
        };
        not_ready.set(SUBJECT, failure);
        tokio::select! {
            Some(event) = events.next() => {
                log_outage(&event, &mut outage);
                if let Ok(event) = event {
                    ranges.apply(to_change(event));
                }
            }
            () = sleep(ROUTE_PERIOD) => {}
        }
    }
}

/// Makes these ranges unreachable and logs what has changed. Returns the reason of a failure.
async fn change_routes(ranges: BTreeSet<IpNet>) -> Result<(), String> {
    let result = spawn_blocking(move || change_ranges(ranges)).await;
    let (UnreachableRouteChanges { added, removed, failure }, delay) = match result {
        Ok(result) => result.map_err(|error| format!("cannot list routes: {error}"))?,
        // The runtime ends.
        Err(error) if error.is_cancelled() => return Ok(()),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    };
    for range in added {
        info!(%range, "range of ClusterIPs is unreachable unless a connect is redirected");
    }
    for range in removed {
        info!(%range, "range is not unreachable any more");
    }
    let failure = failure.map(|failure| format!("cannot change routes: {failure}"));
    failure.or(delay).map_or(Ok(()), Err)
}

/// Makes these ranges unreachable. New ones have to wait while a route would end open connections; then the reason is
/// returned too.
fn change_ranges(
    mut ranges: BTreeSet<IpNet>,
) -> io::Result<(UnreachableRouteChanges, Option<String>)> {
    let present = unreachable_ranges()?;
    let new: BTreeSet<IpNet> = ranges.difference(&present).copied().collect();
    let delay = delay_reason(&new)?;
    if delay.is_some() {
        ranges.retain(|range| present.contains(range));
    }
    Ok((set_unreachable(&ranges)?, delay))
}

/// Returns the reason for which routes to these ranges have to wait. kube-proxy's rules translate the packets of a
/// process on the node's network only after their route is chosen.
fn delay_reason(new: &BTreeSet<IpNet>) -> io::Result<Option<String>> {
    if new.is_empty() {
        return Ok(None);
    }
    let connections = SockDiag::open()?.connections()?;
    let ends = connections.iter().map(|it| (it.canonical_local(), it.canonical_peer()));
    let translated = translated_connections(&ends.collect::<BTreeSet<_>>(), new);
    let reason = translated.first().map(|(own, peer)| {
        format!(
            "{} connections of the node's own processes pass by another proxy's rules, such as from {own} to {peer}: \
             routes for the ranges of ClusterIPs wait for their end; restart these processes",
            translated.len()
        )
    });
    Ok(reason)
}

/// Logs the begin and the end of an outage once each.
fn log_outage(event: &WatchResult<Event<ServiceCIDR>>, outage: &mut WatchOutage) {
    let (kind, change) = ("ServiceCIDR", outage.record(event));
    match event {
        Ok(_) if change == Some(OutageChange::Ended) => info!(kind, "watch works again"),
        Err(error) if change == Some(OutageChange::Began) => {
            warn!(kind, error = %error_chain(error), "watch broke and is begun again");
        }
        _ => {}
    }
}

fn to_change(event: Event<ServiceCIDR>) -> ServiceRangeChange {
    let name = |object: &ServiceCIDR| object.metadata.name.clone().unwrap_or_default().into();
    match event {
        Event::Init => ServiceRangeChange::ListBegun,
        Event::InitDone => ServiceRangeChange::ListCompleted,
        Event::Delete(object) => ServiceRangeChange::Object(name(&object), BTreeSet::new()),
        Event::InitApply(object) | Event::Apply(object) => {
            let texts = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref());
            let ranges = texts.unwrap_or_default().iter();
            let ranges = ranges.filter_map(|text| parse_service_cidr(text).ok());
            ServiceRangeChange::Object(name(&object), ranges.collect())
        }
    }
}
