//! Shell: pods or Deployments of a namespace as a watch reports them, each with the time of the event.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{
    cluster_context::BenchCluster, cold_start_stages::WatchObservation, is_condition_true,
};
use crate::load::unix_us;

/// A running watch and the events so far.
#[derive(Debug)]
pub(super) struct ObjectWatch {
    curl: Child,
    observations: Arc<Mutex<Vec<WatchObservation>>>,
}

impl ObjectWatch {
    /// Starts a watch of the pods in the default namespace.
    pub(super) fn watch_pods(cluster: &BenchCluster) -> Result<Self> {
        Self::new(cluster, "/api/v1/namespaces/default/pods?watch=1", observe_pod)
    }

    /// Starts a watch of the Deployments there; one counts as ready when its scale is 1.
    pub(super) fn watch_deployments(cluster: &BenchCluster) -> Result<Self> {
        Self::new(
            cluster,
            "/apis/apps/v1/namespaces/default/deployments?watch=1",
            observe_deployment,
        )
    }

    fn new(
        cluster: &BenchCluster,
        path: &str,
        read: fn(u64, &Value) -> Option<WatchObservation>,
    ) -> Result<Self> {
        let mut curl = cluster.api_command(path);
        let mut curl = curl.stdout(Stdio::piped()).spawn().context("cannot start curl")?;
        let lines = BufReader::new(curl.stdout.take().context("its output was piped")?).lines();
        let observations = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&observations);
        // A thread of its own stamps each event on arrival, independent of the moment when it is read.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let at_us = unix_us();
                let observation = serde_json::from_str(&line).ok().and_then(|it| read(at_us, &it));
                shared.lock().unwrap_or_else(PoisonError::into_inner).extend(observation);
            }
        });
        Ok(Self { curl, observations })
    }

    /// Copy of all events so far.
    pub(super) fn observations(&self) -> Vec<WatchObservation> {
        self.observations.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for ObjectWatch {
    fn drop(&mut self) {
        // Errors mean that curl has already ended, together with the cluster.
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}

fn observe_deployment(at_us: u64, event: &Value) -> Option<WatchObservation> {
    let deployment = &event["object"];
    Some(WatchObservation {
        at_us,
        name: deployment["metadata"]["name"].as_str()?.to_owned(),
        node: String::new(),
        is_ready: deployment["spec"]["replicas"].as_u64() == Some(1),
    })
}

fn observe_pod(at_us: u64, event: &Value) -> Option<WatchObservation> {
    let pod = &event["object"];
    Some(WatchObservation {
        at_us,
        name: pod["metadata"]["name"].as_str()?.to_owned(),
        node: pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        is_ready: is_condition_true(pod, "Ready"),
    })
}
