//! Pure: arguments and configuration files of each process of the cluster.

use std::path::Path;

use serde_json::{Value, json};

use super::addresses::{CONTROL_PLANE, DNS, PODS, SERVICES, node_addresses, pod_ranges};

/// Image of the pod sandbox: the one that containerd uses by default.
pub(crate) const PAUSE_IMAGE: &str = "registry.k8s.io/pause:3.10.1";

/// Mode in which kube-proxy translates addresses of Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KubeProxyMode {
    Iptables,
    Nftables,
}

impl KubeProxyMode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

fn split_words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Arguments of etcd, without fsync: data would be lost in a crash of the machine, which ends a test cluster anyway.
pub(crate) fn etcd(data: &Path) -> Vec<String> {
    split_words(&format!(
        "--name hub --data-dir {} --unsafe-no-fsync --log-level warn --quota-backend-bytes 4294967296
         --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379
         --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380
         --initial-cluster hub=http://127.0.0.1:2380",
        data.display()
    ))
}

/// Arguments of the API server. It calls webhooks by their endpoints, so it needs no kube-proxy beside it.
pub(crate) fn api_server(pki: &Path, port: u16) -> Vec<String> {
    split_words(&format!(
        "--etcd-servers=http://127.0.0.1:2379 --bind-address=:: --secure-port={port} --advertise-address={hub}
         --service-cluster-ip-range={v4},{v6} --allow-privileged=true --authorization-mode=Node,RBAC
         --enable-admission-plugins=NodeRestriction --client-ca-file={pki}/ca.crt
         --tls-cert-file={pki}/apiserver.crt --tls-private-key-file={pki}/apiserver.key
         --service-account-issuer=https://kubernetes.default.svc.cluster.local
         --service-account-key-file={pki}/service-account.pub
         --service-account-signing-key-file={pki}/service-account.key
         --kubelet-certificate-authority={pki}/ca.crt --kubelet-preferred-address-types=InternalIP
         --kubelet-client-certificate={pki}/apiserver-kubelet-client.crt
         --kubelet-client-key={pki}/apiserver-kubelet-client.key
         --requestheader-client-ca-file={pki}/ca.crt --requestheader-allowed-names=front-proxy-client
         --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group
         --requestheader-extra-headers-prefix=X-Remote-Extra-
         --proxy-client-cert-file={pki}/front-proxy-client.crt
         --proxy-client-key-file={pki}/front-proxy-client.key
         --enable-aggregator-routing=true --profiling=false",
        hub = CONTROL_PLANE[0],
        v4 = SERVICES[0],
        v6 = SERVICES[1],
        pki = pki.display()
    ))
}

/// Arguments of the controller manager. Pod ranges follow from a node's number, so it allocates none.
pub(crate) fn controller_manager(pki: &Path, kubeconfig: &Path) -> Vec<String> {
    split_words(&format!(
        "--kubeconfig={config} --authentication-kubeconfig={config} --authorization-kubeconfig={config}
         --leader-elect=false --allocate-node-cidrs=false --use-service-account-credentials=true
         --root-ca-file={pki}/ca.crt --service-account-private-key-file={pki}/service-account.key
         --cluster-signing-cert-file={pki}/ca.crt --cluster-signing-key-file={pki}/ca.key
         --bind-address=127.0.0.1 --profiling=false",
        config = kubeconfig.display(),
        pki = pki.display()
    ))
}

pub(crate) fn scheduler(kubeconfig: &Path) -> Vec<String> {
    split_words(&format!(
        "--kubeconfig={config} --authentication-kubeconfig={config} --authorization-kubeconfig={config}
         --leader-elect=false --bind-address=127.0.0.1 --profiling=false",
        config = kubeconfig.display()
    ))
}

/// A kubeconfig that refers to certificate files; `user` is the name of a certificate.
pub(crate) fn kubeconfig(pki: &Path, user: &str, server: &str) -> Value {
    let pki = pki.display();
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "cluster",
        "clusters": [{"name": "cluster", "cluster": {
            "server": server, "certificate-authority": format!("{pki}/ca.crt"),
        }}],
        "users": [{"name": user, "user": {
            "client-certificate": format!("{pki}/{user}.crt"), "client-key": format!("{pki}/{user}.key"),
        }}],
        "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
    })
}

/// Text of containerd's configuration file.
pub(crate) fn containerd(cni: &Path) -> String {
    let cni = cni.display();
    format!(
        r#"version = 3
# A score below 0 needs CAP_SYS_RESOURCE, which root in a container may lack.
oom_score = 0

[plugins.'io.containerd.cri.v1.images']
snapshotter = 'overlayfs'

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{PAUSE_IMAGE}'

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['/usr/lib/cni', '/opt/cni/bin']
conf_dir = '{cni}'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = 'runc'
SystemdCgroup = false
"#
    )
}

/// Configuration of a node's pod network: a bridge, whose addresses all other nodes route to this node.
pub(crate) fn cni(node: u8) -> Value {
    // host-local assigns addresses on each node by itself, so nodes need no common store.
    let [v4, v6] = pod_ranges(node);
    json!({
        "cniVersion": "1.0.0", "name": "pods", "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": v4}], [{"subnet": v6}]],
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}

/// Content of the kubelet's configuration file.
pub(crate) fn kubelet(pki: &Path, node: u8) -> Value {
    let pki = pki.display();
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": "::",
        "authentication": {
            "anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": format!("{pki}/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": format!("{pki}/node{node}-serving.crt"),
        "tlsPrivateKeyFile": format!("{pki}/node{node}-serving.key"),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs", "cgroupRoot": "/", "enforceNodeAllocatable": [], "failCgroupV1": false,
        "failSwapOn": false, "oomScoreAdj": 0,
        "clusterDNS": [DNS], "clusterDomain": "cluster.local", "resolvConf": "",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins", "podLogsDir": "/var/log/pods",
        "maxPods": 240, "serializeImagePulls": false, "registryPullQPS": 0, "eventRecordQPS": 0,
        // The disk is shared with the whole machine: images were imported by hand and could not be pulled again, and
        // the disk usage of other programs must not evict pods.
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "shutdownGracePeriod": "0s", "logging": {"format": "text"},
    })
}

/// Arguments of the kubelet of a node.
pub(crate) fn kubelet_args(folder: &Path, node: u8) -> Vec<String> {
    let [v4, v6] = node_addresses(node);
    let folder = folder.display();
    split_words(&format!(
        "--config={folder}/kubelet.json --kubeconfig={folder}/kubeconfig --hostname-override=node{node}
         --node-ip={v4},{v6} --root-dir=/var/lib/kubelet"
    ))
}

/// Content of kube-proxy's configuration file.
pub(crate) fn kube_proxy(folder: &Path, node: u8, mode: KubeProxyMode) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": mode.name(), "clusterCIDR": PODS.join(","), "hostnameOverride": format!("node{node}"),
        "clientConnection": {"kubeconfig": format!("{}/kube-proxy.kubeconfig", folder.display())},
        // Sizes of the connection table apply to the whole machine, so kube-proxy must not set them.
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
        },
        "oomScoreAdj": 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_reaches_webhooks_without_kube_proxy() {
        let args = api_server(Path::new("/p"), 6443);
        assert!(args.contains(&"--enable-aggregator-routing=true".to_owned()));
        assert!(args.contains(&"--secure-port=6443".to_owned()));
        assert!(args.iter().all(|arg| arg.starts_with("--")));
    }

    #[test]
    fn each_node_gives_its_own_addresses_to_pods() {
        let subnet = |node| cni(node)["plugins"][0]["ipam"]["ranges"][0][0]["subnet"].clone();
        assert_eq!(subnet(2), "10.244.2.0/24");
        assert_ne!(subnet(1), subnet(2));
    }

    #[test]
    fn kube_proxy_leaves_the_machines_connection_table_alone() {
        let config = kube_proxy(Path::new("/n"), 1, KubeProxyMode::Nftables);
        assert_eq!(config["mode"], "nftables");
        assert_eq!(config["conntrack"]["maxPerCore"], 0);
    }
}
