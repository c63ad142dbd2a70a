"""Launches on several machines (nodes): a launcher and an agent on each. A launch on one machine imports none of it.

launcher   runner            attempts of the job: the agent decides when, and with which ranks
             link            connection of the launcher to the other nodes: summaries sent, heartbeats received
               peers         state of the other nodes; the agreement with them on a last step
               agent_client  client to the agent of this node; the wait until all nodes have joined
                 agent_process  process and configuration of the agent
                 network        addresses and interfaces of this machine
agent      agent             torch's elastic agent, in a process of its own
             rendezvous      store of the rendezvous, and torch's handlers on it
             heartbeats      state of each node, exchanged through that store
both       messages          between launcher, agent and nodes
"""
