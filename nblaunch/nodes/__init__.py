"""Launches on several machines (nodes): a launcher and an agent on each. A launch on one machine imports none of it.

``attempts`` runs a job here: it waits in ``link`` until all nodes have joined, lets the supervisor run this node's
workers, reports their end, and waits again for a restart. The agent, a process of its own, runs torch's elastic agent
and exchanges heartbeats with the other nodes.

    launcher   attempts            attempts of a job; the agent decides on restarts, and which node has which ranks
                 link              connection to the other nodes: summaries sent, heartbeats handled
                   peer_states     state of the other nodes; the agreement with them on a last step
                   agent_client    client to the agent of this node; the wait until all nodes have joined
                     agent_process   process and configuration of the agent
                     network         addresses and interfaces of this machine
    agent      agent               torch's elastic agent, with workers of the launcher
                 rendezvous        store of the rendezvous, and torch's handlers on it
                 heartbeats        state of each node, exchanged through that store
    both       messages            between launcher, agent and nodes
"""
