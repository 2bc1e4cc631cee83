//! Shell: the sample application as a plain Deployment with a Service, started by a patch of its scale.

use anyhow::{Context as _, Result, bail};

use super::cluster_context::{BenchClientPod, BenchCluster};
use crate::{
    load::{LoadRecord, unix_us},
    sh,
};

/// A Deployment with zero replicas, and its Service.
#[derive(Debug)]
pub(super) struct PlainDeployment {
    name: String,
    address: String,
}

impl PlainDeployment {
    /// Creates the Deployment and starts it once from `client`, because the first start finds all caches cold.
    pub(super) fn new(
        cluster: &BenchCluster,
        client: &BenchClientPod,
        name: &str,
        mounts_token: bool,
    ) -> Result<Self> {
        let name = format!("{name}-{}", if mounts_token { "token" } else { "plain" });
        cluster.create(&manifest(&name, mounts_token))?;
        let address = cluster.wait("an address", || {
            Ok(Some(cluster.cluster_ip(&name)?).filter(|address| !address.is_empty()))
        })?;
        let deployment = Self { name, address };
        deployment.measure_start(cluster, client)?;
        // Each measured start begins from zero pods, like the first one.
        deployment.scale_to_zero(cluster)?;
        Ok(deployment)
    }

    /// Returns the ClusterIP of its Service.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Label selector of its pods.
    pub(super) fn selector(&self) -> String {
        format!("app={}", self.name)
    }

    /// Sets its scale. Returns the moment when the request was sent to the API server, Unix time in µs.
    pub(super) fn scale(&self, cluster: &BenchCluster, replicas: u32) -> Result<u64> {
        let path = format!("/apis/apps/v1/namespaces/default/deployments/{}/scale", self.name);
        let mut curl = cluster.api_command(&path);
        curl.args(["-X", "PATCH", "-H", "Content-Type: application/merge-patch+json"]);
        curl.args(["--data", &format!("{{\"spec\":{{\"replicas\":{replicas}}}}}")]);
        curl.args(["--output", "/dev/null", "--write-out", "%{time_pretransfer} %{time_total}"]);
        let text = sh::capture(&mut curl)?;
        let ended = unix_us();
        let seconds: Vec<f64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        // `time_pretransfer` ends just before curl sends the request.
        let [pretransfer_s, total_s] = seconds[..] else { bail!("curl said `{text}`") };
        Ok(ended - ((total_s - pretransfer_s) * 1e6) as u64)
    }

    /// Scales to one pod. Returns the time from the patch to the first response through the Service, in ms.
    pub(super) fn measure_start(
        &self,
        cluster: &BenchCluster,
        client: &BenchClientPod,
    ) -> Result<f64> {
        let address = format!("{}:80", self.address);
        // The client runs before the patch, so that its own start is no part of the time.
        let mut client_process =
            cluster.pod_command(client, &["measure", "first", "--addr", &address]);
        let client_process = client_process.stdout(std::process::Stdio::piped()).spawn();
        let client_process = client_process.context("cannot start a client")?;
        let patched_us = self.scale(cluster, 1)?;
        let output = client_process.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let record: LoadRecord = serde_json::from_str(text.trim())
            .with_context(|| format!("{}: cannot read `{}`", self.name, text.trim()))?;
        let answered_us = record.at_us + record.first_byte_us;
        Ok(answered_us.saturating_sub(patched_us) as f64 / 1e3)
    }

    /// Scales to zero and waits until no pod is left.
    pub(super) fn scale_to_zero(&self, cluster: &BenchCluster) -> Result<()> {
        // The next start must be a cold one, so the pod has to be gone and not only terminating.
        self.scale(cluster, 0)?;
        let selector = self.selector();
        cluster.wait("the Deployment to have no pod", || {
            Ok(cluster.list(&["pods", "--selector", &selector])?.is_empty().then_some(()))
        })
    }
}

/// Manifest of Deployment and Service, with the readiness probe of a Revision: TCP, every second.
pub(super) fn manifest(name: &str, mounts_token: bool) -> String {
    format!(
        "---
apiVersion: apps/v1
kind: Deployment
metadata: {{ name: {name}, namespace: default }}
spec:
  replicas: 0
  selector: {{ matchLabels: {{ app: {name} }} }}
  template:
    metadata: {{ labels: {{ app: {name} }} }}
    spec:
      automountServiceAccountToken: {mounts_token}
      terminationGracePeriodSeconds: 1
      containers:
      - name: hello
        image: \"dev.local/hello:v1\"
        imagePullPolicy: IfNotPresent
        env: [{{ name: PORT, value: \"8080\" }}]
        ports: [{{ containerPort: 8080 }}]
        readinessProbe: {{ tcpSocket: {{ port: 8080 }}, periodSeconds: 1 }}
---
apiVersion: v1
kind: Service
metadata: {{ name: {name}, namespace: default }}
spec:
  selector: {{ app: {name} }}
  ports: [{{ port: 80, targetPort: 8080 }}]
"
    )
}
