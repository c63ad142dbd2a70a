"""Launches on several machines (nodes): a launcher and an agent on each. A launch on one machine imports none of it.

A job here waits until all nodes have joined, lets the supervisor run this node's workers, reports their end, and waits
again for a restart. The agent, a process of its own, runs torch's elastic agent and exchanges heartbeats with the
other nodes.

In the launcher:

    link.py                attempts of a job, and the connection to the other nodes: summaries sent, heartbeats handled
        peer_states.py     state of the other nodes; the agreement with them on a last step
        agent_client.py    client to the agent of this node; the wait until all nodes have joined
          agent_process.py process and configuration of the agent
          network.py       addresses and interfaces of this machine

In the agent:

    agent.py               torch's elastic agent, whose workers are started by the launcher
      rendezvous.py        store of the rendezvous, and torch's handlers on it
      heartbeats.py        state of each node, exchanged through that store

In both:

    messages.py            between launcher, agent and nodes
"""
