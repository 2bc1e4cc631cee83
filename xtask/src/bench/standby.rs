//! Shell: wakes of frozen pods, on a local node and on a cluster, and the resources that frozen pods use.
//!
//! Subjects: `rouse` is a service on standby, whose pod is frozen when the request is sent. `cold` is the same service
//! without standby, whose pod starts. `direct` is a warm pod at its own address. All times begin with the connect of
//! the client and end with the first byte of the response. Services on standby have `kept` in their names.

mod bursts;
mod cluster_wakes;
mod idle_pods;
mod local_wakes;
mod reclaimed_wakes;
mod resize;
mod service_pod;

use anyhow::{Result, bail};

use self::service_pod::{SERVICE_LABEL, ServicePod};
use super::{
    case_results::CaseResults,
    cluster_context::{BenchClientPod, BenchCluster, ClusterBenchContext},
    node_context::NodeBenchContext,
    report::{BenchGoal, BenchRow, case_row},
    stats::RoundValues,
};
use crate::load::LoadRecord;

/// Subjects of the wakes.
const SUBJECTS: [&str; 3] = ["rouse", "cold", "direct"];
/// Names of the cases in the order in which they are measured.
pub(super) const CASES: [&str; 6] =
    ["wake_local", "wake_cluster", "burst_50", "resize", "wake_reclaimed", "idle_100"];
/// Maximum number of measured rounds, after a first one that finds cold caches and is not measured.
const MAX_ROUNDS: u32 = 10;
/// Number of wakes of each subject in a round, each of another service.
const WAKES: usize = 20;
/// Container of the sample application, in YAML's flow style.
const HELLO_CONTAINER: &str = "image: \"dev.local/hello:v1\", ports: [{ containerPort: 8080 }]";
/// Annotation that keeps one frozen pod, in YAML's flow style after other ones.
const STANDBY: &str = ", rouse.dev/standby: \"1\"";
/// Annotation of a service without a first pod.
const NO_FIRST_POD: &str = ", autoscaling.knative.dev/initial-scale: \"0\"";
/// Annotation of a service whose pod always runs.
const WARM: &str = ", autoscaling.knative.dev/min-scale: \"1\"";

/// Measures all cases of `cargo xtask bench standby`.
pub(super) fn run(
    node_context: &NodeBenchContext,
    cluster_context: &ClusterBenchContext,
) -> Result<Vec<BenchRow>> {
    let mut results = CaseResults::new("standby");
    let mut cases =
        CASES.into_iter().filter(|case| cluster_context.cases.contains(case)).peekable();
    if cases.next_if_eq(&"wake_local").is_some() {
        results.add("wake_local", local_wakes::run(node_context));
    }
    if cases.peek().is_some() {
        let measured = measure_on_cluster(cluster_context, cases, &mut results);
        // The figures of the local node are kept although there is no cluster.
        measured.unwrap_or_else(|error| results.add("cluster", Err(error)));
    }
    results.finish()
}

/// Measures cases on one cluster.
fn measure_on_cluster(
    context: &ClusterBenchContext,
    cases: impl Iterator<Item = &'static str>,
    results: &mut CaseResults,
) -> Result<()> {
    let cluster = context.create_cluster(2, "iptables")?;
    cluster.install("fast")?;
    let clients = cluster.create_client_pods()?;
    let rounds = context.rounds.min(MAX_ROUNDS);
    for case in cases {
        let measured = match case {
            "wake_cluster" => cluster_wakes::run(&cluster, &clients, rounds),
            "burst_50" => bursts::run(&cluster, &clients, rounds),
            "resize" => resize::run(&cluster, &clients),
            "wake_reclaimed" => reclaimed_wakes::run(context, &cluster, &clients, rounds),
            "idle_100" => idle_pods::run(&cluster),
            _ => bail!("the bench standby cannot measure {case}"),
        };
        results.add(case, measured);
        // The next case counts the frozen pods of all services, and a failed one may have left some.
        cluster.kubectl(&["delete", "services.serving.knative.dev", "--all", "--wait=false"])?;
    }
    Ok(())
}

/// Manifest of a service with the shortest window. `annotations` continue those of its template, and `container` is the
/// content of its container, both in YAML's flow style. `spec` are further lines of its template's spec.
fn manifest(name: &str, annotations: &str, container: &str, spec: &str) -> String {
    format!(
        "---
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{ name: {name}, namespace: default }}
spec:
  template:
    metadata:
      annotations: {{ autoscaling.knative.dev/window: 6s{annotations} }}
    spec:
      containers: [{{ {container} }}]
{spec}"
    )
}

/// Manifests of services `PREFIX0` … `PREFIX(count-1)` of the sample application.
fn manifests(prefix: &str, count: usize, annotations: &str) -> String {
    let names = (0..count).map(|index| format!("{prefix}{index}"));
    names.map(|name| manifest(&name, annotations, HELLO_CONTAINER, "")).collect()
}

/// Creates services of the sample application on a cluster, and waits until they are ready. Returns their names.
fn create_services(
    cluster: &BenchCluster,
    prefix: &str,
    count: usize,
    annotations: &str,
) -> Result<Vec<String>> {
    let names: Vec<String> = (0..count).map(|index| format!("{prefix}{index}")).collect();
    cluster.create_services(&manifests(prefix, count, annotations), &names)?;
    Ok(names)
}

/// Deletes services. Their pods may still end after that.
fn delete_services<'a>(
    cluster: &BenchCluster,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<()> {
    let mut args = vec!["delete", "services.serving.knative.dev", "--wait=false"];
    args.extend(names.into_iter().map(String::as_str));
    cluster.kubectl(&args).map(drop)
}

/// Arguments of `xtask load` for one request.
fn request_args<'a>(address: &'a str, host: &'a str) -> [&'a str; 9] {
    ["load", "--addr", address, "--host", host, "--stages", "1x60s", "--requests", "1"]
}

/// Returns the time until the first byte, in ms. Returns an error without a response, and if an activator passed on a
/// request to a warm pod. If a frozen pod was passed over, the time counts like that of the other wakes.
fn first_byte_ms(subject: &str, record: &LoadRecord) -> Result<f64> {
    if !record.is_answered() {
        bail!("no response from a pod: status {} {}", record.status, record.error);
    }
    if subject == "direct" && !record.direct {
        bail!("the response of {} came through an activator", record.pod);
    }
    if subject == "rouse" && !record.direct {
        eprintln!("standby: the response of {} came through an activator", record.pod);
    }
    Ok(record.first_byte_us as f64 / 1e3)
}

/// Sends one request to the port 80 of an address from a client pod.
fn send_request(
    cluster: &BenchCluster,
    client: &BenchClientPod,
    address: &str,
    host: &str,
) -> Result<LoadRecord> {
    let text = cluster.run_in_pod(client, &request_args(address, host))?;
    Ok(serde_json::from_str(text.trim())?)
}

/// Waits until `frozen` pods are frozen and `all` pods exist, of all services together.
fn wait_for_pods(cluster: &BenchCluster, frozen: usize, all: usize) -> Result<()> {
    cluster.wait(&format!("{frozen} frozen pods of {all}"), || {
        // First from the cgroups: requests to the API server would take processor time from the pods.
        if cluster.frozen_pods().len() != frozen {
            return Ok(None);
        }
        let pods = cluster.list(&["pods", "--selector", SERVICE_LABEL])?;
        Ok((pods.len() == all).then_some(()))
    })
}

/// Returns the rows of a case: the times of each subject. Only those of `rouse` have a goal.
fn wake_rows(case: &str, times: &RoundValues, goal: BenchGoal) -> Vec<BenchRow> {
    let row = |(subject, values): (&&'static str, &Vec<f64>)| {
        let goal = if *subject == "rouse" { goal } else { BenchGoal::None };
        case_row(case, subject, "ms", values, goal)
    };
    times.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(status: u16, direct: bool) -> LoadRecord {
        LoadRecord {
            at_us: 1,
            took_us: 900,
            first_byte_us: 750,
            status,
            fresh: true,
            pod: "kept0-00001-x".to_owned(),
            direct,
            listening_us: 0,
            error: String::new(),
        }
    }

    #[test]
    fn no_request_to_a_warm_pod_may_take_an_activator() {
        assert_eq!(first_byte_ms("rouse", &record(200, true)).unwrap(), 0.75);
        assert_eq!(first_byte_ms("cold", &record(200, false)).unwrap(), 0.75);
        assert_eq!(first_byte_ms("rouse", &record(200, false)).unwrap(), 0.75);
        let error = first_byte_ms("direct", &record(200, false)).unwrap_err().to_string();
        assert!(error.contains("kept0-00001-x came through an activator"), "{error}");
        for subject in ["rouse", "cold"] {
            assert!(first_byte_ms(subject, &record(503, false)).is_err(), "{subject}");
        }
    }

    #[test]
    fn the_goal_of_a_wake_is_judged_for_rouse_alone() {
        let times = RoundValues::from([("cold", vec![600.0]), ("rouse", vec![1.0])]);
        let rows = wake_rows("wake_cluster", &times, BenchGoal::P50P99AtMost(2.0, 10.0));
        let judged: Vec<_> = rows.iter().map(|row| (row.subject.as_str(), row.reached)).collect();
        assert_eq!(judged, [("cold", None), ("rouse", Some(true))]);
    }

    #[test]
    fn annotations_follow_the_window_in_one_map() {
        let yaml = manifests("kept", 2, STANDBY);
        let line = "annotations: { autoscaling.knative.dev/window: 6s, rouse.dev/standby: \"1\" }";
        assert_eq!(yaml.matches(line).count(), 2, "{yaml}");
        assert!(yaml.contains("name: kept0,") && yaml.contains("name: kept1,"), "{yaml}");
    }
}
