//! Pure: what the kernel half and the agent agree on: map names, keys, values, capacities.
