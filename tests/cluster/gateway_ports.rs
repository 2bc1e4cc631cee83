//! Gateway ports: clients of PostgreSQL and Redis outside of the cluster wake services by the ports of the gateway.
//!
//! The servers run from the packages of this machine, whose files each node sees.

use serde_json::json;
use tests::host_programs::{HostPrograms, postgres_programs};
use tests::installed_cluster::{RouseCluster, SYSTEM_NAMESPACE};
use tests::knative_features::EnabledFeatures;
use tests::shared_folder::SharedFolder;
use tests::test_cluster::{HELLO_IMAGE, run_for_output};

/// Gateway ports that the installation of the tests opens, of PostgreSQL and of Redis.
const POSTGRES_PORT: u16 = 5432;
const REDIS_PORT: u16 = 6379;
/// Features that allow pods to mount directories of their node.
const HOST_PATH: [&str; 1] = ["kubernetes.podspec-volumes-hostpath"];
/// Longest time of one client, in seconds.
const CLIENT_TIMEOUT_S: &str = "120";

/// Manifest of a service of raw TCP that asks for the gateway port. `probe` is its startup probe as JSON.
fn manifest(
    name: &str,
    port: u16,
    command: &[&str],
    probe: &str,
    programs: &HostPrograms,
) -> String {
    let command = serde_json::to_string(command).expect("texts");
    let (mounts, volumes) = (programs.mounts().join(", "), programs.volumes().join(", "));
    // PostgreSQL refuses to run as root.
    format!(
        "apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{name: {name}, annotations: {{rouse.dev/port: \"{port}\"}}}}
spec:
  template:
    metadata:
      annotations: {{rouse.dev/protocol: tcp, autoscaling.knative.dev/window: 6s}}
    spec:
      containers:
      - image: \"{HELLO_IMAGE}\"
        command: {command}
        startupProbe: {probe}
        securityContext: {{runAsUser: 65534}}
        volumeMounts: [{{name: data, mountPath: /data}}, {mounts}]
      volumes: [{{name: data, emptyDir: {{}}}}, {volumes}]
"
    )
}

fn postgres_script() -> String {
    format!(
        "set -e
cd /data
{0}/initdb --pgdata=db --username=postgres --auth=trust --locale=C --no-sync
echo 'host all all all trust' >> db/pg_hba.conf
exec {0}/postgres -D db -p 8080 -c listen_addresses='*' -c unix_socket_directories=''",
        postgres_programs().display()
    )
}

/// Startup probe of PostgreSQL, which listens before it takes clients.
fn postgres_probe() -> String {
    let program = postgres_programs().join("pg_isready");
    let command = [program.to_str().expect("a path of text"), "--host=127.0.0.1", "--port=8080"];
    let exec = json!({"command": command});
    json!({"exec": exec, "periodSeconds": 1, "timeoutSeconds": 10, "failureThreshold": 120})
        .to_string()
}

const REDIS: [&str; 7] =
    ["/usr/bin/redis-server", "--port", "8080", "--dir", "/data", "--protected-mode", "no"];

/// Runs a client outside of the cluster, which connects to the node port of a gateway port. `host` is its option for the
/// address. Returns its output, or its error.
fn run_client(
    rouse: &RouseCluster,
    port: u16,
    client: &[&str],
    host: &str,
    words: &[&str],
) -> Result<String, String> {
    let service = rouse.cluster.get(&["service", "--namespace", SYSTEM_NAMESPACE, "rouse-gateway"]);
    let ports = service["spec"]["ports"].as_array().expect("ports");
    let opened = ports.iter().find(|it| it["port"] == port).expect("the installation opens it");
    let node_port = opened["nodePort"].as_u64().expect("it has a node's port").to_string();
    let address = [host, rouse.node_address(), "-p", &node_port];
    let command = [&["timeout", CLIENT_TIMEOUT_S], client, &address, words].concat();
    let output = run_for_output(&mut rouse.cluster.command(&command)?)?;
    Ok(output.trim().to_owned())
}

/// Sends SQL. Before it speaks SQL, psql sends an SSLRequest, which the server answers itself.
fn select(rouse: &RouseCluster) -> Result<String, String> {
    let psql = ["psql", "--no-psqlrc", "--tuples-only", "--no-align", "--username", "postgres"];
    run_client(rouse, POSTGRES_PORT, &psql, "--host", &["--command", "select 6 * 7"])
}

fn ping(rouse: &RouseCluster, port: u16) -> Result<String, String> {
    run_client(rouse, port, &["redis-cli"], "-h", &["PING"])
}

#[test]
fn clients_outside_wake_postgres_and_redis_by_their_ports() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("gateway-ports");
    let namespace = &namespace.name;
    let folder = SharedFolder::new(namespace);
    let features = EnabledFeatures::enable(&rouse.cluster, &HOST_PATH);
    let programs = HostPrograms::with_files(&folder);
    let (script, probe) = (postgres_script(), postgres_probe());
    let manifests = [
        manifest("postgres", POSTGRES_PORT, &["/usr/bin/bash", "-c", &script], &probe, &programs),
        manifest("redis", REDIS_PORT, &REDIS, "null", &programs),
    ];
    features.apply(&rouse, namespace, &manifests.join("---\n"));
    for name in ["postgres", "redis"] {
        rouse.wait_ready(namespace, "ksvc", name);
        rouse.wait_asleep(namespace, name);
    }
    let (selected, pong) = (Ok("42".to_owned()), Ok("PONG".to_owned()));
    assert_eq!((select(&rouse), ping(&rouse, REDIS_PORT)), (selected.clone(), pong.clone()));
    for name in ["postgres", "redis"] {
        rouse.wait_asleep(namespace, name);
    }

    let second = manifest("second", POSTGRES_PORT, &REDIS, "null", &programs);
    features.apply(&rouse, namespace, &second);
    rouse.wait_ready(namespace, "ksvc", "second");
    let wait_port = |status: &str| {
        let (kind, condition) = ("route.serving.knative.dev", "GatewayPortReady");
        rouse.wait_condition(namespace, kind, "second", condition, status)
    };
    wait_port("False");
    assert_eq!(select(&rouse), selected, "the first one keeps its port");
    rouse.delete(namespace, &manifests[0]).expect("it is deleted");
    wait_port("True");
    // The condition may be ahead of an activator's table.
    rouse.cluster.wait("the port to lead to the second service", || {
        (ping(&rouse, POSTGRES_PORT) == pong).then_some(())
    });
}
