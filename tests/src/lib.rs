//! Helpers that the test tiers share: clients, load, clusters, local nodes and images.

mod api_client;
pub mod client_pod;
pub mod fake_clock;
pub mod flood;
pub mod frozen_pods;
pub mod host_programs;
pub mod http_client;
pub mod images;
pub mod installed_cluster;
pub mod knative_features;
mod kubectl_errors;
pub mod leftovers;
pub mod load_process;
pub mod mounted_app;
pub mod multi_process_node;
pub mod node_load;
pub mod rouse_node;
pub mod scenarios;
pub mod shared_folder;
pub mod stored_objects;
pub mod streaming_exchange;
pub mod test_cluster;
pub mod test_node;
pub mod tls_client;
pub mod tls_files;
pub mod tunnel;
pub mod wait;
