//! Shell: wakes of plain Deployments that sleep at zero, beside those of Knative Services with the same image.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde_json::Value;

use super::DeploymentManifest;
use crate::{
    bench::{
        cluster_context::{BenchClientPod, BenchCluster},
        cluster_wake::wake_service,
        report::{BenchGoal, BenchRow, case_row},
        stats::median,
    },
    sh,
};

/// Wakes before the measured ones, which find cold caches.
const WARM_UP: u32 = 2;
/// Annotations of a Service that sleeps as soon as it may.
const SLEEPS: &str =
    "{ rouse.dev/scale-to-zero: \"true\", autoscaling.knative.dev/window: \"6s\" }";
/// Label of the EndpointSlices that lead connections to activators.
const ACTIVATOR_SLICES: &str = "endpointslice.kubernetes.io/managed-by=rouse.dev";
/// Time for the last routes to be in force on all nodes.
const SETTLE_TIME: Duration = Duration::from_secs(5);
/// Highest ratio of a Deployment's median to that of a Knative Service.
const MAX_RATIO: f64 = 1.1;

/// Kind of a service that is woken. Each wake has a service of its own, which sleeps from its creation on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WokenKind {
    /// A Knative Service, with which the others are compared.
    Ksvc,
    /// A Deployment whose Service speaks HTTP.
    Http,
    /// A Deployment whose Service speaks raw TCP.
    RawTcp,
    /// A Deployment whose Service speaks HTTP, and whose pods the kubelet probes.
    Probed,
}

impl WokenKind {
    const ALL: [Self; 4] = [Self::Ksvc, Self::Http, Self::RawTcp, Self::Probed];

    /// Case and subject of its row.
    const fn case(self) -> (&'static str, &'static str) {
        match self {
            Self::Ksvc => ("wake_deployment", "ksvc"),
            Self::Http => ("wake_deployment", "rouse"),
            Self::RawTcp => ("wake_deployment_tcp", "rouse"),
            Self::Probed => ("wake_deployment_probed", "rouse"),
        }
    }

    fn service_name(self, number: u32) -> String {
        let kind = match self {
            Self::Ksvc => "ksvc",
            Self::Http => "http",
            Self::RawTcp => "tcp",
            Self::Probed => "probed",
        };
        format!("wake-{kind}-{number}")
    }

    /// Manifest of a Deployment with its Service; `None` for a Knative Service.
    fn manifest(self, number: u32) -> Option<String> {
        let (port_name, container_field) = match self {
            Self::Ksvc => return None,
            Self::Http => ("http", ""),
            Self::RawTcp => ("bytes", ""),
            Self::Probed => {
                ("http", "readinessProbe: { tcpSocket: { port: 8080 }, periodSeconds: 1 }")
            }
        };
        let name = self.service_name(number);
        let annotations = SLEEPS;
        let manifest = DeploymentManifest {
            name: &name,
            annotations,
            port_name,
            container_field,
            ..DeploymentManifest::default()
        };
        Some(manifest.text())
    }
}

/// Wakes one service of each kind in each round, and rotates which kind comes first.
pub(super) fn measure(
    cluster: &BenchCluster,
    clients: &[BenchClientPod],
    rounds: u32,
) -> Result<Vec<BenchRow>> {
    create_sleeping(cluster, rounds + WARM_UP)?;
    let mut times: BTreeMap<WokenKind, Vec<f64>> = BTreeMap::new();
    for round in 0..rounds + WARM_UP {
        for offset in 0..WokenKind::ALL.len() {
            let kind = WokenKind::ALL[(round as usize + offset) % WokenKind::ALL.len()];
            // Rounds of each kind come from all nodes in turn.
            let client = &clients[round as usize % clients.len()];
            let record = wake_service(cluster, client, &kind.service_name(round))?;
            if round >= WARM_UP {
                times.entry(kind).or_default().push(record.first_byte_us as f64 / 1e3);
            }
        }
    }
    Ok(wake_rows(&times))
}

/// Creates all services, and waits until each leads to activators.
fn create_sleeping(cluster: &BenchCluster, count: u32) -> Result<()> {
    let names: Vec<String> = (0..count).map(|it| WokenKind::Ksvc.service_name(it)).collect();
    cluster.create_sleeping_services(&names)?;
    let kinds = || WokenKind::ALL.into_iter().filter(|kind| *kind != WokenKind::Ksvc);
    let manifests = kinds().flat_map(|kind| (0..count).filter_map(move |it| kind.manifest(it)));
    cluster.create(&manifests.collect::<String>())?;
    let names = kinds().flat_map(|kind| (0..count).map(move |it| kind.service_name(it)));
    let names: Vec<String> = names.collect();
    cluster.wait("the Deployments' Services to lead to activators", || {
        let slices = cluster.list(&["endpointslices", "--selector", ACTIVATOR_SLICES])?;
        Ok(names.iter().all(|name| leads_to_activators(&slices, name)).then_some(()))
    })?;
    // kube-proxy follows the slices a moment later, and shows no sign of it.
    sh::sleep(SETTLE_TIME);
    Ok(())
}

/// Returns true if one of the slices belongs to the Service and has an endpoint.
fn leads_to_activators(slices: &[Value], service: &str) -> bool {
    slices.iter().any(|slice| {
        let has_endpoint = slice["endpoints"].as_array().is_some_and(|it| !it.is_empty());
        slice["metadata"]["labels"]["kubernetes.io/service-name"] == service && has_endpoint
    })
}

/// Rows of the times from the request to the first byte, in ms. The goal follows from the Knative Services of the run.
fn wake_rows(times: &BTreeMap<WokenKind, Vec<f64>>) -> Vec<BenchRow> {
    let reference = median(times.get(&WokenKind::Ksvc).map_or(&[], Vec::as_slice)).value;
    let as_ksvc = BenchGoal::AtMost((reference * MAX_RATIO * 10.0).round() / 10.0);
    let row = |(kind, times): (&WokenKind, &Vec<f64>)| {
        let (case, subject) = kind.case();
        let goal = match kind {
            WokenKind::Http | WokenKind::RawTcp => as_ksvc,
            // A Knative Service needs no report of the kubelet, so this one may take longer.
            WokenKind::Ksvc | WokenKind::Probed => BenchGoal::None,
        };
        case_row(case, subject, "ms", times, goal)
    };
    times.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn deployments_are_judged_by_the_knative_services_of_the_run() {
        let times = BTreeMap::from([
            (WokenKind::Ksvc, vec![500.0]),
            (WokenKind::Http, vec![549.0]),
            (WokenKind::RawTcp, vec![551.0]),
            (WokenKind::Probed, vec![900.0]),
        ]);
        let rows = wake_rows(&times);
        let reached: Vec<Option<bool>> = rows.iter().map(|row| row.reached).collect();
        assert_eq!(reached, [None, Some(true), Some(false), None]);
    }

    #[test]
    fn a_service_sleeps_once_its_slice_has_an_activator() {
        let slice = |service: &str, endpoints: Value| {
            let labels = json!({"kubernetes.io/service-name": service});
            json!({"metadata": {"labels": labels}, "endpoints": endpoints})
        };
        let slices = [slice("a", json!([{}])), slice("b", json!([])), slice("c", Value::Null)];
        let asleep = ["a", "b", "c", "d"].map(|service| leads_to_activators(&slices, service));
        assert_eq!(asleep, [true, false, false, false]);
    }

    #[test]
    fn all_services_have_names_of_their_own() {
        let mut names: Vec<String> =
            WokenKind::ALL.iter().flat_map(|kind| (0..3).map(|it| kind.service_name(it))).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 12);
    }
}
