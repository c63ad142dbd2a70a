"""Launches on several machines (nodes): a launcher and an agent on each. A launch on one machine does not import this
package.

    node 0                                                   node 1
    launcher ── start ─> workers 0, 1  <── gloo / nccl ──>  workers 2, 3 <─ start ── launcher
       ^                                                                                ^
       └── pipes ── agent 0  <── store: rendezvous, ranks, barrier, heartbeats ──>  agent 1 ──┘

Here, a job waits until all nodes have joined, lets the supervisor run this node's workers, reports how they ended, and
waits again before a restart. The agent takes part in torch's elastic rendezvous and exchanges heartbeats with the other
nodes.

nblaunch does not use torchrun's agent, because that agent starts the workers as its own children. Here the launcher
starts and supervises them, as on one machine. Children of an agent could not inherit the notebook's function and model.
Events, logs, diagnosis, results, trained weights and escalation would also need a second implementation. The agent runs
in a fresh process, where its threads do not affect the kernel, and sends messages to the launcher.

nblaunch differs from torchrun in three more ways. Workers do not share the agents' store: each start gets a new store
in the agent of node 0, so that no worker reads a value from an earlier start by mistake. No store listens on all
interfaces. And a node whose ranks have returned starts them again if other nodes restart theirs.

In the launcher:

    link.py              the runner of a job, and the connection to the other nodes, with waits and heartbeats
      peer_states.py     state of the other nodes; agrees with them on a step at which all stop
      agent_client.py    process of this node's agent; messages from and to it
      network.py         addresses and interfaces of this machine

In the agent:

    agent.py             joins one rendezvous after another; the launcher starts the workers in between
      rendezvous.py      store of the rendezvous, and torch's handlers on it
      heartbeats.py      state of each node, exchanged through that store

In both:

    messages.py        messages between launcher, agent and nodes; configuration of an agent
"""
