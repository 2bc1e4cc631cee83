//! A chart that Helm makes and installs: its Deployment sleeps by an annotation of its Service, also over upgrades.
//!
//! `helm create` writes the chart, as for its users. `cargo xtask test` skips the module where Helm is not available.

use std::process::Command;

use tests::installed_cluster::RouseCluster;
use tests::shared_folder::SharedFolder;
use tests::test_cluster::{required_variable, run_for_output};

use super::ScaledApp;

/// Name of the chart and of its release, and so of its Service and Deployment.
const RELEASE: &str = "web";
/// Port of the Service and of its pods: the chart has one value for both.
const PORT: u16 = 8080;
/// Values by which the sample application takes the place of the chart's image. The label is that of a [`ScaledApp`].
const VALUES: &str =
    "image.repository=dev.local/hello,image.tag=v1,service.port=8080,podLabels.app=web";

/// Helm in one namespace, with a directory for its charts and its own files.
struct HelmClient<'a> {
    rouse: &'a RouseCluster,
    namespace: &'a str,
    folder: SharedFolder,
}

impl HelmClient<'_> {
    fn run(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(required_variable("ROUSE_HELM"));
        command.args(args).args(["--namespace", self.namespace]);
        command.arg("--kubeconfig").arg(self.rouse.cluster.kubeconfig()).env_remove("KUBECONFIG");
        for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(home, self.folder.path());
        }
        run_for_output(&mut command)
    }

    /// Path of the chart.
    fn chart(&self) -> String {
        format!("{}/{RELEASE}", self.folder.path())
    }

    /// Upgrades the release, with its earlier values and these.
    fn upgrade(&self, values: &str) -> Result<String, String> {
        self.run(&["upgrade", RELEASE, &self.chart(), "--reuse-values", "--set", values])
    }
}

#[test]
fn a_chart_sleeps_by_the_annotation_of_its_service_and_stays_asleep_over_upgrades() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("scaled-chart");
    let namespace = &namespace.name;
    let helm = HelmClient { rouse: &rouse, namespace, folder: SharedFolder::new(namespace) };
    let app = ScaledApp::deployment(&rouse, namespace, RELEASE);
    let created = helm.run(&["create", &helm.chart()]);
    created
        .and_then(|_| helm.run(&["install", RELEASE, &helm.chart(), "--set", VALUES]))
        .expect("the chart can be installed");
    let annotations = ["rouse.dev/scale-to-zero=true", "autoscaling.knative.dev/window=6s"];
    app.kubectl(&[&["annotate", "service", RELEASE][..], &annotations].concat());
    app.wait_asleep();

    // The chart contains a number of pods, and Helm does not take the field away from its new owner.
    let error = helm.upgrade("podLabels.round=first").expect_err("it contains spec.replicas");
    assert!(error.contains("rouse-scale"), "{error}");
    assert_eq!(app.replicas(), Some(0), "it stays asleep");
    // With an autoscaler of its own, it leaves the number out.
    helm.upgrade("podLabels.round=second,autoscaling.enabled=true").expect("no number is written");
    assert_eq!(app.replicas(), Some(0), "it stays asleep");

    let url = format!("http://{}/", app.address(PORT));
    let request_pod = || rouse.client_on("node1").get(&url).pod().to_owned();
    let pod = request_pod();
    assert_eq!(app.wait_pods_in_use(1, || drop(request_pod())), [pod]);
    let pods = app.pods().expect("the API server responds");
    assert_eq!(pods[0]["metadata"]["labels"]["round"], "second", "the pod is of the new template");

    helm.run(&["uninstall", RELEASE]).expect("it is installed");
    rouse.cluster.wait("all that was made for the chart to go", || {
        let kinds = "podautoscalers,hpa,deployments,services,endpointslices,pods";
        let list = rouse.cluster.get(&[kinds, "--namespace", namespace]);
        list["items"].as_array().is_some_and(Vec::is_empty).then_some(())
    });
}
