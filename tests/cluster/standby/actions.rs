//! Actions of Kubernetes on frozen pods: each has the effect that it has on a running pod.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::images;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster};
use tests::knative_features::EnabledFeatures;
use tests::load_process::assert_none_lost;
use tests::shared_folder::SharedFolder;
use tests::streaming_exchange::StreamingExchange;
use tests::test_cluster::find_condition;

use super::{FrozenPod, LongAgentTimeout, StandbyService, assert_direct, manifest};
use crate::pod_termination::evict_pod;

/// Feature that allows pods to mount a directory of their node.
const HOST_PATH: [&str; 1] = ["kubernetes.podspec-volumes-hostpath"];

/// Waits until the service has one frozen pod, another one than `old`, which answers a request.
fn wait_replaced(service: &StandbyService<'_>, old: &FrozenPod) {
    let new = service.wait_frozen_other(old);
    let client = service.rouse.client_on("node1");
    assert_direct(&client.get(&service.url()), client, &new);
}

#[test]
fn a_frozen_pod_that_is_deleted_or_evicted_ends_in_order_and_is_replaced() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-end");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "ended", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    // Logs are read from files, so they thaw nothing. The kubelet's probes do, and use that is not known for a while.
    let thaws = pod.thaw_causes(&rouse);
    service.kubectl(&["logs", &pod.name]);
    service.wait_frozen_again(&pod);
    let later_thaws = pod.thaw_causes(&rouse).split_off(thaws.len());
    let is_of_others = |cause: &String| ["probe", "other"].contains(&cause.as_str());
    assert!(later_thaws.iter().all(is_of_others), "{later_thaws:?}");
    service.kubectl(&["delete", "pod", &pod.name, "--wait=false"]);
    wait_replaced(&service, &pod);
    let pod = service.wait_frozen();
    evict_pod(&rouse.cluster, namespace, &pod.name);
    wait_replaced(&service, &pod);

    // The whole service, whose only pod is frozen.
    service.wait_frozen();
    service.kubectl(&["delete", "ksvc", "ended", "--wait=false"]);
    rouse.wait_asleep(namespace, "ended");
}

/// Processes of the sample application below a cgroup.
fn hello_processes(cgroup: &Path) -> Vec<Pid> {
    let mut found = Vec::new();
    for container in fs::read_dir(cgroup).expect("the pod has a cgroup").flatten() {
        let processes = fs::read_to_string(container.path().join("cgroup.procs"));
        let processes = processes.unwrap_or_default();
        let is_hello = |id: &&str| {
            let name = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
            name.trim() == "hello"
        };
        let ids = processes.lines().filter(is_hello).filter_map(|id| id.parse().ok());
        found.extend(ids.map(Pid::from_raw));
    }
    found
}

/// The kernel kills a process in the same way for lack of memory.
#[test]
fn a_frozen_container_that_is_killed_starts_again_in_its_pod() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-kill");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "killed", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    let processes = hello_processes(&pod.cgroup);
    let [process] = processes[..] else { panic!("{processes:?}: not one process of hello") };
    kill(process, Signal::SIGKILL).expect("it is there");
    rouse.cluster.wait("the container to be started again", || {
        let object = service.get("pod", &pod.name);
        let has_started = object["status"]["containerStatuses"][0]["restartCount"] == 1;
        (has_started && find_condition(&object, "Ready")["status"] == "True").then_some(())
    });
    let again = service.wait_frozen();
    assert_eq!((&again.uid, again.restarts), (&pod.uid, 1));
    let client = rouse.client_on(pod.other_node());
    assert_direct(&client.get(&service.url()), client, &again);
    service.wait_frozen_again(&again);
}

/// A service whose container has the program of the test images in a directory of the node.
struct ServiceWithProgram<'a> {
    service: StandbyService<'a>,
    folder: SharedFolder,
    _features: EnabledFeatures<'a>,
}

impl<'a> ServiceWithProgram<'a> {
    fn create(rouse: &'a RouseCluster, namespace: &'a str) -> Self {
        let folder = SharedFolder::new(namespace);
        folder.write_program("app", images::test_program());
        let features = EnabledFeatures::enable(&rouse.cluster, &HOST_PATH);
        let container =
            format!("{HELLO_CONTAINER}, volumeMounts: [{{name: tests, mountPath: /tests}}]");
        let path = folder.path();
        let volumes = format!(
            "      volumes: [{{name: tests, hostPath: {{path: {path}, type: Directory}}}}]\n"
        );
        features.apply(rouse, namespace, &manifest("entered", "", &container, &volumes));
        rouse.wait_ready(namespace, "ksvc", "entered");
        let service = StandbyService { rouse, namespace, name: "entered" };
        Self { service, folder, _features: features }
    }
}

#[test]
fn a_command_runs_in_a_frozen_pod_which_stays_awake_until_its_end() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-exec");
    let namespace = &namespace.name;
    let ServiceWithProgram { service, folder, _features } =
        ServiceWithProgram::create(&rouse, namespace);
    let other = StandbyService::create(&rouse, namespace, "other", "", HELLO_CONTAINER);
    let (pod, other_pod) = (service.wait_frozen(), other.wait_frozen());
    let exec = ["exec", pod.name.as_str(), "--", "/tests/app"];
    assert_eq!(service.kubectl(&[&exec[..], &["say=inside"]].concat()), "inside\n");
    service.wait_frozen_again(&pod);

    let words = ["kubectl", "--namespace", namespace.as_str()];
    let words = [&words[..], &exec, &["say=begun", "await=/tests/go", "say=end"]].concat();
    let command = rouse.cluster.command(&words).expect("a cluster of xtask's");
    let mut session = StreamingExchange::start(command);
    rouse.cluster.wait("the command to begin", || (session.received() == b"begun\n").then_some(()));
    // The other service freezes a window after its request at the earliest. By then the first pod would be frozen, too.
    for _ in 0..2 {
        let client = rouse.client_on("node1");
        assert_direct(&client.get(&other.url()), client, &other_pod);
        other.wait_frozen_again(&other_pod);
        assert!(!pod.is_frozen(), "its command runs");
    }
    folder.write_program("go", b"");
    let status = rouse.cluster.wait("the end of the command", || session.exit_status());
    let output = String::from_utf8_lossy(&session.received()).into_owned();
    assert!(status.success() && output == "begun\nend\n", "{status}: {output:?}");
    service.wait_frozen_again(&pod);
}

/// A running `kubectl port-forward`, killed on drop.
struct PortForward {
    child: Child,
    /// Output of the program, which prints a line for each connection. It must stay open.
    _output: BufReader<ChildStdout>,
    /// URL on the loopback of the control plane's network namespace.
    url: String,
}

impl PortForward {
    fn start(service: &StandbyService<'_>, pod: &FrozenPod) -> Self {
        let args =
            ["kubectl", "port-forward", "--namespace", service.namespace, &pod.name, ":8080"];
        let mut command = service.rouse.cluster.command(&args).expect("a cluster of xtask's");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        // `Forwarding from 127.0.0.1:43127 -> 8080`
        let mut line = String::new();
        output.read_line(&mut line).expect("text");
        let words = line.strip_prefix("Forwarding from ").and_then(|it| it.split_once(" -> "));
        let (address, _) = words.unwrap_or_else(|| panic!("{line:?}"));
        Self { child, _output: output, url: format!("http://{address}/") }
    }
}

impl Drop for PortForward {
    fn drop(&mut self) {
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

#[test]
fn a_forwarded_port_reaches_the_application_in_a_frozen_pod() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-port");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "forwarded", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    let forward = PortForward::start(&service, &pod);
    for _ in 0..2 {
        assert_eq!(rouse.get_from_outside(&forward.url, &[]).pod(), pod.name);
        service.wait_frozen_again(&pod);
    }
}

/// CPU and memory that the container of a pod requests.
fn requests_of(service: &StandbyService<'_>, pod: &FrozenPod) -> (Value, Value) {
    let object = service.get("pod", &pod.name);
    let requests = &object["spec"]["containers"][0]["resources"]["requests"];
    (requests["cpu"].clone(), requests["memory"].clone())
}

#[test]
fn a_frozen_pod_gives_its_cpu_request_back_and_gets_it_again_once_it_serves() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-size");
    let namespace = &namespace.name;
    let container =
        format!("{HELLO_CONTAINER}, resources: {{requests: {{cpu: 100m, memory: 64Mi}}}}");
    let service = StandbyService::create(&rouse, namespace, "sized", "", &container);
    let pod = service.wait_frozen();
    rouse.cluster.wait("a small request of the frozen pod", || {
        (requests_of(&service, &pod).0 == "1m").then_some(())
    });
    // Longer than a restoration takes: without load the pod would be frozen again.
    let args = ["--stages", "2x20s", "--path", "/?sleep=100"];
    let load = rouse.client_on("node1").start_load(&service.address(), "sized", &args);
    rouse.cluster.wait("the request of the template", || {
        let (cpu, memory) = requests_of(&service, &pod);
        (cpu == "100m" && memory == "64Mi").then_some(())
    });
    let requests = load.finish();
    assert_none_lost(&requests, 100);
    assert!(requests.iter().all(|request| request.pod == pod.name), "one pod served all");
    service.wait_frozen_again(&pod);
}
